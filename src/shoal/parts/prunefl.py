"""PruneFL: what is trained is chosen again by what it gains per second (Jiang et al. 2019, arXiv:1909.12326)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.extras import Declaration, Extra
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Round
from shoal.core.wire import REQUEST
from shoal.parts.lib.checks import require
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.lib.submodel_units import count_units_left
from shoal.parts.lib.weight_masks import (
    apply_masks,
    init_mask_state,
    list_prunable_weights,
    mask_strongest,
    mask_top_elements,
    note_known_masks,
    plan_masked_training,
    replace_masks,
)

MANY = 10**9


@dataclass(frozen=True)
class PruneFL(Part):
    """Which weights are trained is chosen again and again, by what they gain per second of a round.

    The server prunes the share `rate` of every layer before the first round. Every `every` rounds devices report their
    squared gradients, and up to the share `change` of every layer is given up for the elements, wherever they are, that
    gain more per second of a round than the model does; so the size of the model changes too. `change` halves every
    `half_life` rounds. Never is more than the share `most` of all weights kept, or 1 - `rate` if that is more.
    """

    cite: ClassVar = ("jiang2019prunefl",)
    reads: ClassVar = frozenset({"extras", "outcomes"})
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"rate": 0.0, "change": 0.0, "most": 1.0})

    rate: float = 0.5
    every: int = 50
    change: float = 0.3
    half_life: int = 10_000
    most: float = 1.0

    def __post_init__(self):
        require(self, "0 <= rate < 1 and 0 <= change < 1", 0 <= self.rate < 1 and 0 <= self.change < 1)
        require(self, "0 < most <= 1", 0 < self.most <= 1)
        require(self, "every and half_life from 1 up", 0 < self.every < MANY and 0 < self.half_life < MANY)

    def init_server(self, round: Round) -> Tree:
        counts = {
            k: count_units_left(round.anchor[k].numel(), self.rate) for k in list_prunable_weights(self, round.net)
        }
        return init_mask_state(mask_strongest(round.anchor, counts), round)

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        return plan_masked_training(plans, state), state

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        due = (round.number + 1) % self.every == 0 and (state["masks"] or self.change > 0)
        return {d: {"squares": REQUEST} for d in round.devices if d != SERVER} if due else {}, state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        """Of all elements, kept or not; a tree by tensor would be cut to what is kept."""
        if not device.has_request("squares"):
            return {}
        gradient = compute_loss_gradient(device.net, device.anchor, device.samples)
        return {"squares": torch.cat([g.flatten().square() for g in gradient.values()])}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        size = sum(net.initial[k].numel() for k in net.shared_trainable)
        about = "the squared gradient of every parameter"
        return {"squares": Extra("tensor", shape=(size,), low=0, when="squares", crowd="mean", about=about)}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        state, params = note_known_masks(state, round), apply_masks(params, state["masks"])
        reports = [(w, r.report.get(self.name())) for w, r in zip(round.weights.tolist(), round.replies, strict=True)]
        squares = [w * report["squares"].double() for w, report in reports if report]
        if squares:
            state = replace_masks(state, self.choose_masks(params, state["masks"], torch.stack(squares).sum(0), round))
        return apply_masks(params, state["masks"]), state

    def choose_masks(
        self, params: Params, masks: Mapping[str, Tensor], squares: Tensor, round: Round
    ) -> dict[str, Tensor]:
        """What is kept from now on: first what must stay, then the best of the rest as long as they are worth it."""
        names, common = list_prunable_weights(self, round.net), round.net.shared_trainable
        gains = dict(zip(common, squares.split([params[k].numel() for k in common])))
        stay = torch.cat([self.find_non_prunable(params[k], masks.get(k), round.number).flatten() for k in names])
        gain = torch.cat([gains[k] for k in names])
        rest = (~stay).nonzero().flatten()
        rest = rest[gain[rest].argsort(descending=True, stable=True)]
        whole = sum((gains[k].sum() for k in common if k not in names), gain[stay].sum())
        count = len(squares) - len(rest)
        # 1e-9: 0.29 * 100 is 28.999999999999996 and means 29
        room = max(0, floor(max(self.most, 1 - self.rate) * len(gain) + 1e-9) - int(stay.sum()))
        kept = stay.index_fill(
            0, rest[: min(count_worthwhile(gain[rest], whole, count, *measure_round_seconds(round)), room)], True
        )
        split = kept.split([params[k].numel() for k in names])
        return {k: mask.view_as(params[k]) for k, mask in zip(names, split)}

    def find_non_prunable(self, value: Tensor, mask: Tensor | None, number: int) -> Tensor:
        """Of the kept elements of a tensor all but the smallest, which may go."""
        sizes = value.abs() if mask is None else torch.where(mask, value.abs(), -1)
        kept = value.numel() if mask is None else int(mask.sum())
        return mask_top_elements(kept - floor(self.change * 0.5 ** (number / self.half_life) * kept), sizes)

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return {name: apply_masks(own, state["masks"]) for name, own in judged.items()}


def measure_round_seconds(round: Round) -> tuple[float, float]:
    """The seconds that a round takes whatever is kept, and that each kept element adds; means over the replies.

    Masks do not shorten computing, so that an element costs its way down and up, the same for all.
    """
    size = round.anchor[round.net.shared_trainable[0]].element_size()
    times = [
        round.fleet.get_profile(r.device, r.round).estimate_times(size, r.outcome.macs_work, size)
        for r in round.replies
        if r.device != SERVER
    ]
    return sum(t.compute for t in times) / len(times), sum(t.down + t.up for t in times) / len(times)


def count_worthwhile(gains: Tensor, whole: Tensor, count: int, fixed: float, each: float) -> int:
    """How many of the elements, in falling order of what they gain, gain more per second than the model before them.

    That model has `count` elements, which gain `whole`.
    """
    gains, whole = gains.cpu(), whole.cpu()  # torch has no deterministic form of cumsum on a GPU
    before = whole + gains.cumsum(0) - gains
    time = fixed + each * (count + torch.arange(len(gains), dtype=gains.dtype, device=gains.device))
    return int((gains * time > before * each).long().cumprod(0).sum())
