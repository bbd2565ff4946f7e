"""FjORD: ordered dropout makes a narrow model the first part of a wide one (Horvath et al. 2021, arXiv:2102.13451)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require, require_axes
from shoal.parts.lib.submodel_units import count_units_at_width, draw_tier, parse_levels, take_first_units


@dataclass(frozen=True)
class FjORD(Part):
    """A device holds the first units of every axis, as many as its tier allows, and trains fewer in each mini-batch.

    The width of a mini-batch is one of `widths` up to the device's own, equally likely each. With `distil` the widest
    model learns from the labels in every mini-batch, and the narrow one from the widest.
    """

    cite: ClassVar = ("horvath2021fjord",)
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"widths": "1", "distil": False})

    widths: str = "0.2,0.4,0.6,0.8,1"
    distil: bool = False

    def __post_init__(self):
        own = parse_levels(self.widths)
        require(
            self, "widths such as '0.2,0.6,1', different and 0 < width <= 1", bool(own) and 0 < own[0] <= own[-1] <= 1
        )

    @property
    def needs_class_logits(self) -> bool:
        """What is distilled are probabilities of classes."""
        return self.distil

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, round.net.axes)
        return {}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        widest = {d: draw_tier(round.streams, self.name(), d, parse_levels(self.widths)) for d in plans}
        kept = {width: take_first_units(round.net, width) for width in set(widest.values())}
        return {d: replace(p, kept=kept[widest[d]], known=True, level=True) for d, p in plans.items()}, state

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        """The sizes of the whole axes: a device that holds a slice cannot tell where a narrower one ends."""
        sizes = torch.tensor([axis.size for axis in round.net.axes], dtype=torch.int32)
        return {d: {"sizes": sizes} for d in round.devices}, state

    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        """1 for the units of this step's width, 0 for those beyond."""
        net, levels = device.net, parse_levels(self.widths)
        allowed = levels[: levels.index(draw_tier(device.streams, self.name(), device.id, levels)) + 1]
        width = allowed[int(torch.randint(len(allowed), (), generator=generator))]
        whole = zip(net.axes, device.got["sizes"].tolist(), strict=True)
        return {
            a.name: mask_first_units(a.size, count_units_at_width(size, width), net.dtype, net.place)
            for a, size in whole
        }

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_narrow(params: Params, batch: Batch) -> BatchScore:
            return inner(local.net.slicer.scale_unit_outputs(params, local.draws), batch)

        def score_distilled(params: Params, batch: Batch) -> BatchScore:
            wide, scored = inner(params, batch), score_narrow(params, batch)
            return scored._replace(loss=wide.loss + compute_teacher_loss(scored.logits, wide.logits.detach(), batch))

        return score_distilled if self.distil else score_narrow

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        """Only the narrow model moves; weight decay would move the rest too."""
        return (update if self.distil else local.net.slicer.mask_units(update, local.draws)), state


def compute_teacher_loss(logits: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    """The cross-entropy to the teacher's probabilities, over positions where a sample has several."""
    losses = -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return batch.mean(losses.reshape(len(losses), -1).mean(1))


@lru_cache(4096)
def mask_first_units(size: int, ones: int, dtype: torch.dtype, place: torch.device) -> Tensor:
    """The mask of a prefix; nobody writes to it, so steps and devices may share it."""
    return (torch.arange(size, device=place) < ones).to(dtype)
