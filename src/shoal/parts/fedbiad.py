"""FedBIAD: devices drop rows while they learn, steered by the trend of the loss (Xue et al. 2023, arXiv:2307.07172)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import aggregate_holders
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Batch, BatchScore, Device, Local, Reply, Round, Scorer
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.posterior import compute_slab_deviation
from shoal.parts.lib.row_patterns import (
    compute_cut_shapes,
    cut_rows,
    find_row_tensors,
    list_droppable_rows,
    make_blank_pattern,
    pick_row_pattern,
    plan_kept_rows,
    restore_rows,
)


@dataclass(frozen=True)
class FedBIAD(Part):
    """Drops the share `rate` of the rows of every matrix, trains the others and sends those alone.

    Up to round `early` the rows are drawn by chance, and drawn again whenever the sum of the last `window` losses is
    above that of the `window` before; rows score where the loss fell. Later a device keeps the rows that scored best.
    Weights are drawn around their means with the deviation of the posterior, or with `s_tilde` where that is not
    negative. `combining` is over the `holders` of a row; `literal`, as printed, counts a dropped row as 0, and
    `fill` as unchanged.
    """

    cite: ClassVar = ("xue2023fedbiad",)
    sets: ClassVar = frozenset({"plan"})
    stage: ClassVar = "rows"
    codes_delta: ClassVar = False
    neutral: ClassVar = Neutral({"rate": 0.0, "s_tilde": 0.0})

    rate: float = 0.5
    early: int = 55
    window: int = 3
    combining: str = "holders"
    tie_gates: bool = False
    drop_output_rows: bool = False
    s_tilde: float = -1.0

    def __post_init__(self):
        require(self, "0 <= rate < 1", 0 <= self.rate < 1)
        require(self, "early from 0 and window from 1 up", 0 <= self.early < 10**9 and 0 < self.window < 10**6)
        require(self, "combining one of holders, literal, fill", self.combining in ("holders", "literal", "fill"))

    def acts_at(self, point: str) -> bool:
        return self.combining == "literal" if point == "combine" else super().acts_at(point)

    def list_row_groups(self, net: Net) -> list[Axis]:
        return list_droppable_rows(net, self.tie_gates, self.drop_output_rows)

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        groups = self.list_row_groups(device.net)
        like = params[device.net.trainable[0]]
        scores = {g.name: memory["scores"][g.name] if memory else like.new_zeros(g.size) for g in groups}
        generator = device.generator("pattern")
        first = device.round < self.early
        kept = {
            g.name: pick_row_pattern(None if first else scores[g.name], g.size, self.rate, generator).to(like)
            for g in groups
        }
        state = {"kept": kept, "scores": scores, "losses": like.new_zeros(2 * self.window)}
        return params, state | {
            "early": like.new_full((), float(first)),
            "mask": self.build_update_mask(device.net, params, kept),
        }

    def build_update_mask(self, net: Net, like: Params, kept: Mapping[str, Tensor]) -> Params:
        """What may move, by tensor."""
        touched = find_row_tensors(self.list_row_groups(net))
        ones = {k: like[k].new_ones([1] * like[k].dim()) for k in net.trainable if k in touched}
        return net.slicer.mask_units(ones, kept)

    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        """Another pattern, should it be needed, and what shakes the weights, where that changes any."""
        like, due = device.anchor[device.net.trainable[0]], device.round < self.early and self.is_trend_step(step)
        make = (lambda size: pick_row_pattern(None, size, self.rate, generator)) if due else make_blank_pattern
        drawn = {g.name: make(g.size).to(like) for g in self.list_row_groups(device.net)}
        size = self.s_tilde if self.s_tilde >= 0 else compute_slab_deviation(device.net, self.rate, device.round)
        if size > 1e-9 and size > 1e-7 * float(like.square().mean().sqrt()):
            for name in device.net.trainable:
                shape = device.anchor[name].shape
                drawn[f"noise {name}"] = size * torch.randn(shape, generator=generator).to(like)
        return drawn

    def is_trend_step(self, step):
        """Whether the trend is looked at after this step, counted from 0; it may be a number or a tensor."""
        return (step >= 2 * self.window) & (step % self.window == 0)

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_spike_and_slab(params: Params, batch: Batch) -> BatchScore:
            noise = {k: local.draws[f"noise {k}"] for k in params if f"noise {k}" in local.draws}
            shaken = {k: p + noise[k] if k in noise else p for k, p in params.items()}
            return inner(local.net.slicer.mask_units(shaken, local.state["kept"]), batch)

        return score_spike_and_slab

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        losses = torch.cat((state["losses"][1:], scored.loss.detach().reshape(1).to(state["losses"].dtype)))
        step, steps = local.numbers["step"], local.numbers["steps"]
        rose = ~(losses[self.window :].sum() <= losses[: self.window].sum())
        due = self.is_trend_step(step) & (step + 1 < steps) & (state["early"] > 0)
        kept, scores = {}, {}
        for name, own in state["kept"].items():
            other = local.draws[name]
            scores[name] = state["scores"][name] + due * own * torch.where(rose, other, torch.ones_like(other))
            kept[name] = torch.where(due & rose, other, own)
        sound = scored.loss.isfinite()
        update = {k: torch.where(sound, u, torch.zeros_like(u)) for k, u in update.items()}
        mask = self.build_update_mask(local.net, local.anchor, state["kept"])
        return update, state | {"kept": kept, "scores": scores, "losses": losses, "mask": mask}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"scores": state["scores"], "kept": state["kept"]}

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        if not memory.get("kept"):
            return message, memory
        plan = plan_kept_rows(memory["kept"])
        return cut_rows(message, lambda name: link.slicer.find_kept_lines(name, link.like[name], plan)), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        return compute_cut_shapes(shapes, message)

    def decode(self, message: Message, link: CodecLink) -> Message:
        return restore_rows(message, link.shapes, covers=self.combining != "fill")

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        """As printed: a row that a device dropped counts with the value 0."""
        gone = [{k: r.delta[k] - round.anchor[k] * ~mask for k, mask in r.covered.items()} for r in replies]
        whole = [replace(r, delta=r.delta | own, covered={}) for r, own in zip(replies, gone)]
        return aggregate_holders(replace(round, replies=whole)), state
