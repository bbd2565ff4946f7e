"""FedDH as released: control parameters move by an order of the devices that is scaled to [0, 1], not by a gradient.

Released experiment code of FedDHAD (github.com/anonymous20231015/anonymous, commit da9f25db, experiments/fedDH.py) for
Liu et al. 2025, arXiv:2507.10430. The part `feddh` follows the paper. Symbols as there, and

    s_i   the sum over tensors of all elements of matmul(w_i, g), g the mean gradient of the devices in their last epoch
    r_k   what the code has in place of dF/dv_k and dF/db_k, before scaling
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import BatchScore, Samples
from shoal.core.extras import Declaration, Extra
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.label_counts import LABEL_COUNTS, collect_label_counts, compute_known_degrees, count_labels
from shoal.parts.lib.submodel_units import device_state_key

START = (1.0, 0.0)
"""v_k and b_k of a device that has not taken part."""


@dataclass(frozen=True)
class FedDHReleased(Part):
    """A reply counts n_k / (v_k JS_k + b_k); v_k and b_k lose rate times their device's place in an order, in [0, 1].

    The rates are `lr_v` and `lr_b`, and in round t, from 0, they are multiplied by decay^t (`decay_v`, `decay_b`) once
    more, so that they are lr decay^(t (t + 1) / 2). What is scaled to [0, 1] over the devices of the round is r_k; one
    device moves by the whole rate and one not at all. Devices send their mean gradient of the last epoch, as much again
    as the model.
    """

    cite: ClassVar = ("liu2025feddhad",)
    needs_class_logits: ClassVar = True
    metrics: ClassVar = (
        Metric("mean_v", "control parameter v, mean", drawn=True, about="mean of v_k over the devices that replied"),
        Metric("mean_b", "control parameter b, mean", drawn=True, about="mean of b_k over the devices that replied"),
    )
    reads: ClassVar = frozenset({"cards", "extras", "sizes", "updates"})

    lr_v: float = 1e-4
    decay_v: float = 0.999
    lr_b: float = 1e-4
    decay_b: float = 0.99

    def __post_init__(self):
        require(self, "rates and decays >= 0", min(self.lr_v, self.lr_b, self.decay_v, self.decay_b) >= 0)

    @classmethod
    def name(cls) -> str:
        return "feddh_released"

    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        return card | {"labels": count_labels(samples, net.classes)}

    def declare_card(self, net: Net) -> Declaration:
        return {"labels": LABEL_COUNTS}

    def init_server(self, round: Round) -> Tree:
        return {"labels": collect_label_counts({}, round), "control": {}}

    # on devices: the mean gradient of the last epoch ------------------------------------------------------------------
    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        zero = torch.zeros((), device=device.net.place)
        gradient = tree.make_zeros(tree.select_params(params, device.net.shared_trainable))
        return params, {"gradient": gradient, "steps": zero, "epoch": zero}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        epoch = local.numbers["epoch"]
        same = (epoch <= state["epoch"]).to(state["steps"].dtype)
        gradient = {k: same.to(g.dtype) * g + update[k].detach() for k, g in state["gradient"].items()}
        latest = torch.maximum(state["epoch"], epoch.to(state["epoch"].dtype))
        return update, {"gradient": gradient, "steps": same * state["steps"] + 1, "epoch": latest}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"gradient": {k: g / state["steps"].clamp(min=1).to(g.dtype) for k, g in state["gradient"].items()}}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"gradient": Extra("params", about="its mean gradient over the last epoch")}

    # on the server ----------------------------------------------------------------------------------------------------
    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        state = state | {"labels": collect_label_counts(state["labels"], round)}
        degree = self.compute_dynamic_degrees(state, [r.device for r in round.replies])
        return weights * (degree.min() / degree), state

    def compute_dynamic_degrees(self, state: Tree, devices: Sequence[int]) -> Tensor:
        """D_k = v_k JS_k + b_k, with the floor of `feddh`: the code would divide by 0."""
        js, floor = compute_known_degrees(state["labels"], devices)
        control = [state["control"].get(device_state_key(d), START) for d in devices]
        raw = torch.tensor([v * degree + b for degree, (v, b) in zip(js, control)], dtype=torch.float64)
        return raw.clamp(min=floor)

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """The control parameters after this round: v_k first, then b_k with the new v_k."""
        devices, t = [r.device for r in round.replies], round.number
        sizes = [float(r.size) for r in round.replies]
        products = self.multiply_by_gradient(round)
        # the divergence that stands in r_k of v_k is of the device whose number is the position of k in the cohort
        positions = compute_known_degrees(state["labels"], range(len(devices)))[0]
        rate_v, rate_b = (
            lr * decay ** (t * (t + 1) / 2) for lr, decay in ((self.lr_v, self.decay_v), (self.lr_b, self.decay_b))
        )
        for slot, rate, factors in ((0, rate_v, positions), (1, rate_b, [1.0] * len(devices))):
            degrees = self.compute_dynamic_degrees(state, devices).tolist()
            places = scale_to_unit_range(compute_raw_steps(products, sizes, degrees, factors))
            control = dict(state["control"])
            for device, place in zip(devices, places):
                own = list(control.get(device_state_key(device), START))
                own[slot] = abs(own[slot] - rate * place)
                control[device_state_key(device)] = own if all(map(isfinite, own)) else list(START)
            state = state | {"control": control}
        control = [state["control"].get(device_state_key(d), START) for d in devices]
        round.tell("mean_v", fmean(v for v, _ in control))
        round.tell("mean_b", fmean(b for _, b in control))
        return params, state

    def multiply_by_gradient(self, round: Round) -> list[float]:
        """s_i of each reply; g is the mean over devices by numbers of samples."""
        gradients = [r.report[self.name()]["gradient"] for r in round.replies]
        total = max(sum(r.size for r in round.replies), 1)
        products = [0.0] * len(round.replies)
        for name in round.net.shared_trainable:
            anchor = round.anchor[name]
            parts = [own[name].double() * (r.size / total) for own, r in zip(gradients, round.replies) if name in own]
            if not parts:
                continue
            mean = torch.stack(parts).sum(0)
            for at, reply in enumerate(round.replies):
                weights = anchor if name not in reply.delta else anchor + reply.delta[name]
                products[at] += float(sum_matrix_product(weights.double(), mean))
        return products


def sum_matrix_product(weights: Tensor, gradient: Tensor) -> Tensor:
    """All elements of matmul(w, g) added up: with g transposed for a matrix, by kernel for convolutions.

    It is the inner product for biases alone. Kernels that are not square have no such product; there it is taken, too.
    """
    if weights.dim() == 2:
        return weights.sum(0) @ gradient.sum(0)
    if weights.dim() > 2 and weights.shape[-1] == weights.shape[-2]:
        return (weights.sum(-2) * gradient.sum(-1)).sum()
    return (weights * gradient).sum()


def compute_raw_steps(
    products: Sequence[float], sizes: Sequence[float], degrees: Sequence[float], factors: Sequence[float]
) -> list[float]:
    """r_k of each device: the sum over devices is divided by the normaliser after every term, so the last one rules."""
    shares = [n / d for n, d in zip(sizes, degrees)]
    found = []
    for k, (size, degree, factor) in enumerate(zip(sizes, degrees, factors)):
        normaliser = (sum(shares) * degree) ** 2
        value = -products[k] * (sum(shares) - shares[k]) * size * factor / normaliser
        for i, (product, share) in enumerate(zip(products, shares)):
            value = (value + (product * size * factor * share if i != k else 0.0)) / normaliser
        found.append(value)
    return found


def scale_to_unit_range(values: Sequence[float]) -> list[float]:
    """(value - smallest) / (largest - smallest); all 0 where that is no number."""
    low, high = min(values), max(values)
    if not (isfinite(low) and isfinite(high) and high > low):
        return [0.0] * len(values)
    return [(value - low) / (high - low) for value in values]
