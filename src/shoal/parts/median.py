"""Coordinate-wise median of the replies (Yin et al. 2018, arXiv:1803.01498)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Reply, Round
from shoal.parts.lib.coordinate_sort import combine_sorted


@dataclass(frozen=True)
class Median(Part):
    """Each coordinate of the model takes the median over the replies that hold it.

    Weights do not count, except that 0 takes a reply out.
    """

    cite: ClassVar = ("yin2018robust",)
    reads: ClassVar = frozenset({"updates"})

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        return combine_sorted(round, take_median), state


def take_median(ranked: Tensor, holders: Tensor) -> Tensor:
    """The mean of the one or two middle values."""
    # clamped for coordinates that no reply holds; combine_sorted ignores what comes out there
    low, high = (holders - 1).clamp(min=0) // 2, holders // 2
    low, high = low.clamp(max=len(ranked) - 1), high.clamp(max=len(ranked) - 1)
    return (ranked.gather(0, low[None]) + ranked.gather(0, high[None]))[0] / 2
