"""Coordinate-wise trimmed mean of the replies (Yin et al. 2018, arXiv:1803.01498)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Reply, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.coordinate_sort import combine_sorted


@dataclass(frozen=True)
class TrimmedMean(Part):
    """Each coordinate of the model takes the mean of the replies without the smallest and the largest values.

    `trim` is the share that is left out at each end.
    """

    cite: ClassVar = ("yin2018robust",)
    reads: ClassVar = frozenset({"updates"})
    neutral: ClassVar = Neutral({"trim": 0.0}, equal_devices=True)

    trim: float = 0.1

    def __post_init__(self):
        require(self, "0 <= trim < 0.5", 0 <= self.trim < 0.5)

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        return combine_sorted(round, self.average_untrimmed), state

    def average_untrimmed(self, ranked: Tensor, holders: Tensor) -> Tensor:
        cut = (self.trim * holders).floor()
        rank = torch.arange(len(ranked), device=ranked.device).view(-1, *[1] * holders.dim())
        inside = (rank >= cut) & (rank < holders - cut)
        # 1 at least for coordinates that no reply holds; combine_sorted ignores what comes out there
        return torch.where(inside, ranked, 0).sum(0) / inside.sum(0).clamp(min=1)
