"""FedBIAD: devices drop rows of their weight matrices while they learn, steered by the trend of the loss.

Xue et al. 2023, arXiv:2307.07172: Algorithm 1, whose order this file follows from `ClientUpdate` on. Its symbols:

    U, mu_j     the variational parameters (the means of the weights), and their row j
    beta        the dropping pattern: 1 for rows that are kept, 0 for those that are dropped, eq. (4)
    p           the dropout rate;   s~ the deviation of the posterior, eq. (13)
    E^k         the weight score vector: one number per row, which device k keeps for life, eq. (9)
    R_b, tau    the last round of stage one, and the window of the loss trend in iterations
    Delta L     the sum of the last tau losses minus that of the tau before, eq. (8)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Reply, Round
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
    """Devices drop rows of every weight matrix, train the others and send those alone.

    In stage one, up to round `early` (R_b), the pattern is drawn at random, and drawn again whenever the sum of the
    last `window` (tau) losses is above that of the `window` before; rows score where the loss fell. In stage two a
    device keeps the rows that scored best.

    `rate` is p, the share of rows dropped. `combining` is the mean over the devices that hold a row (`holders`), or
    over all, where a dropped row counts as 0 (`literal`, eq. (10) as printed) or as unchanged (`fill`). `tie_gates`
    drops the four gates of an LSTM unit together. `drop_output_rows` lets rows of the output layer drop too, as those
    of a language model always may. `s_tilde` is the deviation s~ of weights around U; below 0 it is that of eq. (13).
    """

    cite: ClassVar = ("xue2023fedbiad",)
    metrics: ClassVar = (
        Metric(
            "kept_share",
            "share of the model that a reply holds, mean",
            "share",
            when="unless `combining` is `fill`",
            about="mean over replies of the share of trained elements that are in kept rows",
        ),
        Metric(
            "covered_share",
            "share of the model that some reply holds",
            "share",
            drawn=True,
            when="unless `combining` is `fill`",
            about="share of trained elements that are in kept rows of at least one reply; it falls when devices come "
            "to keep the same rows",
        ),
        Metric("stage", "stage", drawn=True, about="1 up to round `early`, then 2"),
    )
    reads: ClassVar = frozenset({"updates"})
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
        """The groups of rows, one per matrix, of which the share p is dropped."""
        return list_droppable_rows(net, self.tie_gates, self.drop_output_rows)

    # ClientUpdate, lines 9-14: the first pattern ----------------------------------------------------------------------
    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """beta at random in stage one (line 11), from E^k in stage two (line 13)."""
        groups = self.list_row_groups(device.net)
        like = params[device.net.trainable[0]]
        scores = {g.name: memory["scores"][g.name] if memory else like.new_zeros(g.size) for g in groups}
        generator = device.generator("pattern")
        stage_one = device.round < self.early
        beta = {
            g.name: pick_row_pattern(None if stage_one else scores[g.name], g.size, self.rate, generator).to(like)
            for g in groups
        }
        state = {"kept": beta, "scores": scores, "losses": like.new_zeros(2 * self.window)}
        return params, state | {
            "early": like.new_full((), float(stage_one)),
            "mask": self.build_update_mask(device.net, params, beta),
        }

    def build_update_mask(self, net: Net, like: Params, beta: Mapping[str, Tensor]) -> Params:
        """By tensor, 1 for the elements that the pattern lets move and 0 for the others."""
        names = find_row_tensors(self.list_row_groups(net))
        ones = {k: like[k].new_ones([1] * like[k].dim()) for k in net.trainable if k in names}
        return net.slicer.mask_units(ones, beta)

    # lines 15-17: one iteration ---------------------------------------------------------------------------------------
    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        """The random numbers of iteration v: a pattern for line 21, should the loss rise, and the noise s~ eps."""
        like, due = device.anchor[device.net.trainable[0]], device.round < self.early and self.is_trend_step(step)
        make = (lambda size: pick_row_pattern(None, size, self.rate, generator)) if due else make_blank_pattern
        draws = {g.name: make(g.size).to(like) for g in self.list_row_groups(device.net)}
        size = self.s_tilde if self.s_tilde >= 0 else compute_slab_deviation(device.net, self.rate, device.round)
        # noise below the resolution of a float32 beside the weights changes nothing and is not drawn
        if size > 1e-9 and size > 1e-7 * float(like.square().mean().sqrt()):
            for name in device.net.trainable:
                shape = device.anchor[name].shape
                draws[f"noise {name}"] = size * torch.randn(shape, generator=generator).to(like)
        return draws

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        """The loss at theta = beta o (U + s~ eps), eps ~ N(0, I) (line 16)."""

        def score_spike_and_slab(params: Params, batch: Batch) -> BatchScore:
            noise = {k: local.draws[f"noise {k}"] for k in params if f"noise {k}" in local.draws}
            theta = {k: p + noise[k] if k in noise else p for k, p in params.items()}
            return inner(local.net.slicer.mask_units(theta, local.state["kept"]), batch)

        return score_spike_and_slab

    # lines 18-26: the loss trend, the pattern and the scores ----------------------------------------------------------
    def is_trend_step(self, step):
        """Whether iteration v ends with a look at the trend (line 18); v counts from 0, as a number or a tensor."""
        return (step >= 2 * self.window) & (step % self.window == 0)

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        """The next beta and E^k from Delta L; rows with beta = 0 do not move, eq. (7), which `mask` sees to."""
        losses = torch.cat((state["losses"][1:], scored.loss.detach().reshape(1).to(state["losses"].dtype)))
        v, last = local.numbers["step"], local.numbers["steps"]
        # Delta L > 0 (line 20), written so that a loss that is not a number counts as a rise
        rose = ~(losses[self.window :].sum() <= losses[: self.window].sum())
        # not after the last iteration: the pattern that is sent must have been trained
        due = self.is_trend_step(v) & (v + 1 < last) & (state["early"] > 0)
        kept, scores = {}, {}
        for name, beta in state["kept"].items():
            resampled = local.draws[name]
            # eq. (9): kept rows score 1 where the loss fell, else only if the new pattern keeps them too
            scores[name] = state["scores"][name] + due * beta * torch.where(rose, resampled, torch.ones_like(resampled))
            kept[name] = torch.where(due & rose, resampled, beta)
        # one bad batch must not spoil the model: it makes no step
        finite = scored.loss.isfinite()
        update = {k: torch.where(finite, u, torch.zeros_like(u)) for k, u in update.items()}
        mask = self.build_update_mask(local.net, local.anchor, state["kept"])
        return update, state | {"kept": kept, "scores": scores, "losses": losses, "mask": mask}

    # line 28: what is sent --------------------------------------------------------------------------------------------
    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"scores": state["scores"], "kept": state["kept"]}

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        """The rows mu_j with beta_j = 1, and beta."""
        if not memory.get("kept"):
            return message, memory
        plan = plan_kept_rows(memory["kept"])
        return cut_rows(message, lambda name: link.slicer.find_kept_lines(name, link.like[name], plan)), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        return compute_cut_shapes(shapes, message)

    # line 7: on the server --------------------------------------------------------------------------------------------
    def decode(self, message: Message, link: CodecLink) -> Message:
        """beta o U, 0 in dropped rows."""
        return restore_rows(message, link.shapes, covers=self.combining != "fill")

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        """Eq. (10) as printed: a row that a device dropped counts with the value 0, so that it shrinks every round."""
        gone = [{k: r.delta[k] - r.anchor[k] * ~mask for k, mask in r.covered.items()} for r in replies]
        whole = [replace(r, delta=r.delta | own, covered={}) for r, own in zip(replies, gone)]
        return average_replies(replace(round, replies=whole)), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """Nothing but tells the stage, and how much of the model came back."""
        round.tell("stage", 1 if round.number < self.early else 2)
        if self.combining == "fill":
            return params, state
        trained = round.net.shared_trainable
        total, kept, covered = sum(round.anchor[k].numel() for k in trained), [], []
        for name in trained:
            whole = torch.ones_like(round.anchor[name], dtype=torch.bool)
            masks = [r.covered.get(name, whole) for r in round.replies]
            kept += [mask.sum() for mask in masks]
            covered.append(torch.stack(masks).any(0).sum())
        round.tell("kept_share", torch.stack(kept).sum().double() / (total * len(round.replies)))
        round.tell("covered_share", torch.stack(covered).sum().double() / total)
        return params, state
