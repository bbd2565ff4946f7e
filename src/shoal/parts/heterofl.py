"""HeteroFL: every device trains a model of its own fixed width (Diao et al. 2021, arXiv:2010.01264)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.plan import Plan, Slicer
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Round
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require, require_axes
from shoal.parts.lib.row_patterns import compute_cut_shapes, cut_rows, restore_rows
from shoal.parts.lib.submodel_units import draw_tier, is_batch_normalised, parse_levels, take_first_units


@dataclass(frozen=True)
class HeteroFL(Part):
    """Every device trains a model of its own fixed width: the first units of every axis.

    A device's width is one of `rates`; the outputs of its units are divided by it in training. With `mask_loss` the
    logits of classes that a device does not hold count as 0 in its loss, and their rows of the last layer are not sent:
    only devices that hold a class change its row.
    """

    cite: ClassVar = ("diao2021heterofl",)
    sets: ClassVar = frozenset({"plan"})
    stage: ClassVar = "rows"
    codes_delta: ClassVar = False
    neutral: ClassVar = Neutral({"rates": "1", "mask_loss": False})

    rates: str = "1,0.5,0.25,0.125,0.0625"
    mask_loss: bool = True

    def __post_init__(self):
        own = parse_levels(self.rates)
        require(
            self, "rates such as '1,0.5,0.25', different and 0 < rate <= 1", bool(own) and 0 < own[0] <= own[-1] <= 1
        )

    @property
    def replaces_loss(self) -> bool:
        """Masked logits make a loss of their own; without them the given one is only scaled."""
        return self.mask_loss

    @property
    def needs_class_logits(self) -> bool:
        """Logits are masked by class."""
        return self.mask_loss

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, round.net.axes)
        return {}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        rates = {d: draw_tier(round.streams, self.name(), d, parse_levels(self.rates)) for d in plans}
        kept = {rate: take_first_units(round.net, rate) for rate in set(rates.values())}
        return {d: replace(p, kept=kept[rates[d]], known=True, level=True) for d, p in plans.items()}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        net, rate = device.net, draw_tier(device.streams, self.name(), device.id, parse_levels(self.rates))
        like = torch.empty(0, dtype=net.dtype, device=net.place)
        scale = {a.name: like.new_full((a.size,), 1 / rate) for a in net.axes if not is_batch_normalised(net, a)}
        return params, {"scale": scale, "present": find_present_classes(device)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_scaled(params: Params, batch: Batch) -> BatchScore:
            return inner(local.net.slicer.scale_unit_outputs(params, local.state["scale"]), batch)

        def score_present_classes(params: Params, batch: Batch) -> BatchScore:
            scored = score_scaled(params, batch)
            return scored._replace(
                loss=local.net.task.compute_mean_loss(torch.where(local.state["present"], scored.logits, 0.0), batch)
            )

        return score_present_classes if self.mask_loss else score_scaled

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"present": state["present"]} if self.mask_loss else {}

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        held: Tensor | None = memory.get("present")
        if held is None:
            return message, memory
        names = find_class_rows(link.like, link.slicer, len(held))
        return cut_rows(message, lambda name: {0: held} if name in names else {}), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        return compute_cut_shapes(shapes, message)

    def decode(self, message: Message, link: CodecLink) -> Message:
        return restore_rows(message, link.shapes, covers=True)


def find_present_classes(device: Device) -> Tensor:
    """Which classes a device holds samples of."""
    samples = device.samples
    labels = samples.targets.index_select(0, samples.index.to(samples.targets.device)).flatten()
    return (torch.bincount(labels, minlength=device.net.classes) > 0).to(device.net.place)


def find_class_rows(like: Params, slicer: Slicer, classes: int) -> list[str]:
    """The tensors of the last layer that has a row for each class."""
    cut = {name for name, cuts in slicer.cuts.items() if any(c.dim == 0 and ":" not in a.name for c, a in cuts)}
    rows = [k for k, v in like.items() if v.dim() and v.shape[0] == classes and k not in cut]
    owner = next((k.rpartition(".")[0] for k in reversed(rows) if like[k].dim() > 1), None)
    return [k for k in rows if k.rpartition(".")[0] == owner]
