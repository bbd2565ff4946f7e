"""FedDH: replies count less the further their labels are from everybody's (Liu et al. 2025, arXiv:2507.10430)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import aggregate_holders
from shoal.core.errors import ShoalError
from shoal.core.measures.local_models import rebuild_local_model
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Round, Samples
from shoal.parts.lib.checks import require
from shoal.parts.lib.label_counts import (
    collect_label_counts,
    compute_known_degrees,
    count_labels,
    estimate_label_shares,
)
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.lib.submodel_units import device_state_key
from shoal.parts.lib.weight_sensitivity import (
    average_trees,
    cap_weights,
    compute_mean_change,
    compute_weight_derivatives,
    project_gradient,
)


@dataclass(frozen=True)
class FedDH(Part):
    """A reply counts n_k / D_k with D_k = v_k JS_k + b_k, where JS_k is the non-IID degree of the device.

    v_k and b_k start at 1 and 0 and follow the slope of the global loss: as the devices' progress shows it (`pseudo`),
    on the server's samples (`server_data`), or as the devices of the next round report it (`client_grad`). Histograms
    are `told` by devices, or `estimated` by the server from its own samples (`literal`: by the printed formula).
    """

    cite: ClassVar = ("liu2025feddhad",)

    lr_v: float = 1e-4
    decay_v: float = 0.999
    lr_b: float = 1e-4
    decay_b: float = 0.99
    gradient: str = "pseudo"
    labels: str = "told"
    beta: float = 4.0
    cap: float = 1.0
    reaggregate: bool = False

    def __post_init__(self):
        rates = min(self.lr_v, self.lr_b, self.decay_v, self.decay_b, self.beta) >= 0
        require(self, "rates, decays and beta >= 0", rates)
        require(self, "0 < cap <= 1", 0 < self.cap <= 1)
        require(self, "gradient one of pseudo, server_data, client_grad", self.gradient in GRADIENTS)
        require(self, "labels one of told, estimated, literal", self.labels in ("told", "estimated", "literal"))

    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        return card | {"labels": count_labels(samples, net.classes)} if self.labels == "told" else card

    def init_server(self, round: Round) -> Tree:
        if round.server is None and (self.gradient == "server_data" or self.labels != "told"):
            problem = f"{self} needs samples on the server, and there are none."
            raise ShoalError("no-data", problem, "Give it some: --server-data per-class:10.")
        known = collect_label_counts({}, round) if self.labels == "told" else {}
        return {"labels": known, "control": {}, "late": []}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        told = self.gradient == "client_grad"
        return {"gradient": compute_loss_gradient(device.net, device.anchor, device.samples)} if told else {}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        state = state | {"labels": self.update_histograms(state["labels"], round)}
        degree = self.compute_dynamic_degrees(state, [r.device for r in round.replies])
        return cap_weights(weights * (degree.min() / degree), self.cap), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        devices = [r.device for r in round.replies]
        before = self.compute_dynamic_degrees(state, devices)
        now = {"devices": devices, "degree": before, "ways": compute_weight_derivatives(round)}
        due, late = (state["late"], [now]) if self.gradient == "client_grad" else ([now], [])
        if due:
            state = self.update_control(
                state,
                due[0],
                project_gradient(due[0]["ways"], self.estimate_global_gradient(params, round)),
                round.number,
            )
        if self.reaggregate:
            weights = round.weights * before / self.compute_dynamic_degrees(state, devices)
            once, again = aggregate_holders(round), aggregate_holders(replace(round, weights=weights / weights.sum()))
            params = params | {k: params[k] + again[k] - once[k] for k in round.net.shared_trainable}
        return params, state | {"late": late}

    def update_histograms(self, known: dict[str, Tensor], round: Round) -> dict[str, Tensor]:
        """The histograms known so far, with those of devices that are seen for the first time."""
        if self.labels == "told":
            return collect_label_counts(known, round)
        assert round.server is not None
        made = {}
        for reply in [r for r in round.replies if device_state_key(r.device) not in known and r.device >= 0]:
            shares = estimate_label_shares(
                round.net, rebuild_local_model(reply, round), round.server, self.beta, self.labels == "literal"
            )
            made[device_state_key(reply.device)] = shares * reply.size
        return known | made

    def compute_dynamic_degrees(self, state: Tree, devices: Sequence[int]) -> Tensor:
        """D of these devices, with a floor under it."""
        js, floor = compute_known_degrees(state["labels"], devices)
        control = [state["control"].get(device_state_key(d), [1.0, 0.0]) for d in devices]
        raw = torch.tensor([v * degree + b for degree, (v, b) in zip(js, control)], dtype=torch.float64)
        return raw.clamp(min=floor)

    def estimate_global_gradient(self, params: Params, round: Round) -> Params:
        """The gradient of the global loss, or what stands for it."""
        if self.gradient == "server_data":
            assert round.server is not None
            return compute_loss_gradient(round.net, params, round.server)
        if self.gradient == "client_grad":
            return average_trees([r.report[self.name()]["gradient"] for r in round.replies], round)
        steps = sum(w * r.outcome.steps for w, r in zip(round.weights.tolist(), round.replies))
        size = max(round.work.lr * steps, 1e-12)
        return {k: -change / size for k, change in compute_mean_change(round).items()}

    def update_control(self, state: Tree, past: Tree, pull: Tensor, number: int) -> Tree:
        """v and b one step down the slope dF/dD_k = -pull_k / D_k; where the floor holds D, only upwards.

        Where all labels are alike there is nothing to tell devices apart by, and nothing moves.
        """
        js, floor = compute_known_degrees(state["labels"], past["devices"])
        if max(js) < 1e-9:
            return state
        control = dict(state["control"])
        rate_v, rate_b = self.lr_v * self.decay_v**number, self.lr_b * self.decay_b**number
        for device, degree, slant in zip(past["devices"], js, (-pull / past["degree"]).tolist()):
            v, b = control.get(device_state_key(device), [1.0, 0.0])
            slant = min(slant, 0.0) if v * degree + b < floor else slant
            moved = [v - rate_v * degree * slant, b - rate_b * slant]
            control[device_state_key(device)] = moved if all(map(isfinite, moved)) else [1.0, 0.0]
        return state | {"control": control}


GRADIENTS = ("pseudo", "server_data", "client_grad")
