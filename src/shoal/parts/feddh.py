"""FedDH: replies count less the further the labels of a device are from those of all (dynamic aggregation).

Liu et al. 2025, arXiv:2507.10430: section 5.1 and Algorithm 1. Its symbols:

    P_k, D_JS(P_k) the label distribution of device k, and its Jensen-Shannon divergence from that of all, formula (5)
    D_k            the non-IID degree v_k D_JS(P_k) + b_k, formula (4), with the control parameters v_k and b_k
    q_k            the weight of the reply of device k, formula (11)
    F, w(Q)        the global loss, and the aggregated model as a function of the weights, formula (3)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, log
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.batch import Samples
from shoal.core.errors import ShoalError
from shoal.core.extras import Declaration, Extra
from shoal.core.measures.local_models import rebuild_local_model
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.label_counts import (
    LABEL_COUNTS,
    collect_label_counts,
    compute_known_degrees,
    count_labels,
    estimate_label_shares,
)
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.lib.reply_means import (
    average_trees,
    cap_weights,
    compute_mean_delta,
    compute_weight_derivatives,
    project_gradient,
)
from shoal.parts.lib.submodel_units import device_state_key


@dataclass(frozen=True)
class FedDH(Part):
    """A reply counts n_k / D_k, where the non-IID degree D_k = v_k JS_k + b_k of its device is learnt.

    v_k and b_k start at 1 and 0 and go down the slope of the global loss with the rates `lr_v` and `lr_b`, which are
    multiplied by `decay_v` and `decay_b` in every round.

    `gradient_from` chooses what stands for the gradient of the global loss: the mean change of the devices (`pseudo`),
    the gradient on the server's samples (`server_data`), or those that the devices of the next round report
    (`client_grad`). `labels` chooses where P_k comes from: `told` by devices, or `estimated` by the server from its own
    samples (FedDHE), with the sharpness `beta`; `literal` is formula (8) as printed. No reply counts more than the
    share `cap` of all. `reaggregate` averages once more with the new v_k and b_k in the same round.
    """

    cite: ClassVar = ("liu2025feddhad",)
    needs_class_logits: ClassVar = True
    metrics: ClassVar = (
        Metric("largest_weight", "largest weight of a reply", "share", drawn=True, about="the largest weight q_k"),
        Metric("smallest_weight", "smallest weight of a reply", "share", drawn=True, about="the smallest weight q_k"),
        Metric(
            "weight_entropy",
            "evenness of the weights",
            "share",
            drawn=True,
            about="entropy of the weights q_k over that of equal ones: 1 where all are alike, 0 where one has all",
        ),
        Metric("mean_v", "control parameter v, mean", drawn=True, about="mean of v_k over the devices that replied"),
        Metric("mean_b", "control parameter b, mean", drawn=True, about="mean of b_k over the devices that replied"),
    )
    renamed_options: ClassVar = {"gradient": "gradient_from"}
    reads: ClassVar = frozenset({"cards", "extras", "outcomes", "sizes", "updates"})

    lr_v: float = 1e-4
    decay_v: float = 0.999
    lr_b: float = 1e-4
    decay_b: float = 0.99
    gradient_from: str = "pseudo"
    labels: str = "told"
    beta: float = 4.0
    cap: float = 1.0
    reaggregate: bool = False

    def __post_init__(self):
        rates = min(self.lr_v, self.lr_b, self.decay_v, self.decay_b, self.beta) >= 0
        require(self, "rates, decays and beta >= 0", rates)
        require(self, "0 < cap <= 1", 0 < self.cap <= 1)
        require(self, "gradient_from one of pseudo, server_data, client_grad", self.gradient_from in GRADIENTS)
        require(self, "labels one of told, estimated, literal", self.labels in ("told", "estimated", "literal"))

    # Algorithm 1, lines 1-3: the JS divergence of each device, and the control parameters -----------------------------
    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        return card | {"labels": count_labels(samples, net.classes)} if self.labels == "told" else card

    def declare_card(self, net: Net) -> Declaration:
        return {"labels": LABEL_COUNTS} if self.labels == "told" else {}

    def init_server(self, round: Round) -> Tree:
        if round.server is None and (self.gradient_from == "server_data" or self.labels != "told"):
            problem = f"{self} needs samples on the server, and there are none."
            raise ShoalError("no-data", problem, "Give it some: --server-data per-class:10.")
        if self.gradient_from == "pseudo" and round.optimiser.is_adaptive:
            problem = f"feddh reads the gradient off steps of SGD, and the optimiser is {round.optimiser.kind}."
            raise ShoalError("clash", problem, "Use the optimiser sgd, or feddh(gradient='client_grad').")
        known = collect_label_counts({}, round) if self.labels == "told" else {}
        return {"labels": known, "control": {}, "late": []}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        if self.gradient_from != "client_grad":
            return {}
        return {"gradient": compute_loss_gradient(device.net, device.anchor, device.samples)}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        gradient = Extra("params", crowd="mean", about="the gradient of its loss at the received model")
        return {"gradient": gradient} if self.gradient_from == "client_grad" else {}

    # lines 9-11: the global model, the control parameters, the weights ------------------------------------------------
    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        """q_k = (n_k / D_k) / sum_j (n_j / D_j), formula (11), over the devices of this round.

        Line 11 computes q after the round, for a cohort that the next round will not have; here it is computed when it
        is needed, from the same v_k and b_k.
        """
        state = state | {"labels": self.update_histograms(state["labels"], round)}
        degree = self.compute_dynamic_degrees(state, [r.device for r in round.replies])
        return cap_weights(weights * (degree.min() / degree), self.cap), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """The control parameters after a step of formula (10); `client_grad` takes the one of the round before."""
        devices = [r.device for r in round.replies]
        before = self.compute_dynamic_degrees(state, devices)
        now = {"devices": devices, "degree": before, "ways": compute_weight_derivatives(round)}
        due, late = (state["late"], [now]) if self.gradient_from == "client_grad" else ([now], [])
        if due:
            state = self.update_control(
                state,
                due[0],
                project_gradient(due[0]["ways"], self.estimate_global_gradient(params, round)),
                round.number,
            )
        if self.reaggregate:
            weights = round.weights * before / self.compute_dynamic_degrees(state, devices)
            once, again = average_replies(round), average_replies(replace(round, weights=weights / weights.sum()))
            params = params | {k: params[k] + again[k] - once[k] for k in round.net.shared_trainable}
        self.tell_weights(state, round)
        return params, state | {"late": late}

    def tell_weights(self, state: Tree, round: Round) -> None:
        """Tell the weights of this round's replies, and the control parameters of their devices after it."""
        q = round.weights.double()
        entropy = -torch.xlogy(q, q).sum() / log(len(q)) if len(q) > 1 else 1.0
        control = [state["control"].get(device_state_key(r.device), [1.0, 0.0]) for r in round.replies]
        round.tell("largest_weight", q.max())
        round.tell("smallest_weight", q.min())
        round.tell("weight_entropy", entropy)
        round.tell("mean_v", fmean(v for v, _ in control))
        round.tell("mean_b", fmean(b for _, b in control))

    def update_histograms(self, known: dict[str, Tensor], round: Round) -> dict[str, Tensor]:
        """n_k P_k of all devices known so far, with those of the devices that took part for the first time."""
        if self.labels == "told":
            return collect_label_counts(known, round)
        assert round.server is not None
        new = {}
        for reply in [r for r in round.replies if device_state_key(r.device) not in known and r.device >= 0]:
            shares = estimate_label_shares(
                round.net, rebuild_local_model(reply, round), round.server, self.beta, self.labels == "literal"
            )
            new[device_state_key(reply.device)] = shares * reply.size
        return known | new

    def compute_dynamic_degrees(self, state: Tree, devices: Sequence[int]) -> Tensor:
        """D_k = v_k D_JS(P_k) + b_k of these devices, formula (4).

        The floor keeps D_k above 0, and one device with hardly any divergence from getting all the weight.
        """
        js, floor = compute_known_degrees(state["labels"], devices)
        control = [state["control"].get(device_state_key(d), [1.0, 0.0]) for d in devices]
        raw = torch.tensor([v * degree + b for degree, (v, b) in zip(js, control)], dtype=torch.float64)
        return raw.clamp(min=floor)

    def estimate_global_gradient(self, params: Params, round: Round) -> Params:
        """g, the gradient of the global loss F at w, or what `gradient_from` takes in its place.

        `pseudo` is (w^(t-1) - w^t) / (lr * mean number of steps), exact for one step of plain SGD.
        """
        if self.gradient_from == "server_data":
            assert round.server is not None
            return compute_loss_gradient(round.net, params, round.server)
        if self.gradient_from == "client_grad":
            return average_trees([r.report[self.name()]["gradient"] for r in round.replies], round)
        sum_factors = round.optimiser.schedule.sum_factors
        steps = sum(w * sum_factors(r.outcome.steps) for w, r in zip(round.weights.tolist(), round.replies))
        size = max(round.work.lr * steps, 1e-12)
        return {k: -change / size for k, change in compute_mean_delta(round).items()}

    def update_control(self, state: Tree, past: Tree, pull: Tensor, number: int) -> Tree:
        """v_k and b_k after one step down the slope of F, formula (10).

        dF/dD_k = -pull_k / D_k with pull_k = q_k <g, w_k - w>, dF/dv_k = D_JS(P_k) dF/dD_k and dF/db_k = dF/dD_k. Where
        the floor holds D_k, a step may only raise it, or v_k and b_k would sink without an effect. Where all labels are
        alike there is nothing to tell devices apart by, and nothing moves. What is not finite starts anew.
        """
        js, floor = compute_known_degrees(state["labels"], past["devices"])
        if max(js) < 1e-9:
            return state
        control = dict(state["control"])
        rate_v, rate_b = self.lr_v * self.decay_v**number, self.lr_b * self.decay_b**number
        for device, degree, slope in zip(past["devices"], js, (-pull / past["degree"]).tolist()):
            v, b = control.get(device_state_key(device), [1.0, 0.0])
            slope = min(slope, 0.0) if v * degree + b < floor else slope
            moved = [v - rate_v * degree * slope, b - rate_b * slope]
            control[device_state_key(device)] = moved if all(map(isfinite, moved)) else [1.0, 0.0]
        return state | {"control": control}


GRADIENTS = ("pseudo", "server_data", "client_grad")
