"""Norm bound: no single update can move the model far (Sun et al. 2019, arXiv:1911.07963)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.tree import Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Reply, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.float_tensors import select_float_tensors
from shoal.parts.lib.tensor_norms import compute_norm


@dataclass(frozen=True)
class NormBound(Part):
    """Updates that are longer than a bound are shortened to it: delta_k min(1, bound / norm of delta_k).

    `bound` is the largest 2-norm of an update, over all tensors that devices train. With 0 it is `times` the median
    norm of the round's replies, which needs no knowledge of how long updates are and fails when half of the devices
    or more lie.
    """

    cite: ClassVar = ("sun2019backdoor",)
    reads: ClassVar = frozenset({"updates"})
    neutral: ClassVar = Neutral({"bound": 1e12})
    metrics: ClassVar = (
        Metric("clipped", "share of replies that were too long", "share", drawn=True),
        Metric("bound", "largest norm of an update", drawn=True),
    )

    bound: float = 0.0
    times: float = 1.0

    def __post_init__(self):
        require(self, "bound >= 0 and times > 0", self.bound >= 0 and self.times > 0)

    def sift(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Sequence[Reply], Tree]:
        names, bounded = round.net.shared_trainable, [r for r in replies if r.device != SERVER]
        if not bounded:
            return replies, state
        lengths = torch.stack([compute_norm(tree.select_params(r.delta, names)) for r in bounded]).cpu()
        bound = self.bound or self.times * float(lengths.quantile(0.5))
        norms = {r.device: length for r, length in zip(bounded, lengths.tolist())}
        too_long = {device for device, norm in norms.items() if norm > bound}
        round.tell("clipped", len(too_long) / len(norms))
        round.tell("bound", bound)
        return [shrink_update(r, bound / norms[r.device]) if r.device in too_long else r for r in replies], state


def shrink_update(reply: Reply, factor: float) -> Reply:
    """The reply with a shorter update; counters stay as they are."""
    return replace(reply, delta=reply.delta | tree.scale_params(select_float_tensors(reply.delta), factor))
