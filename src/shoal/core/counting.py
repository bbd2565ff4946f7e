"""Multiply-accumulates, as torch's own counter sees them, counted once for all that they depend on."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.utils.flop_counter import FlopCounterMode

from shoal.core.plan import Plan

if TYPE_CHECKING:
    from shoal.core.net import Net


class Tally:
    """What pieces of work cost. The cost of a piece follows from shapes, so it is counted once for each key."""

    def __init__(self):
        self.known: dict[tuple, int] = {}

    def of(self, key: tuple, work: Callable[[], object]) -> int:
        """Do the work, and say what it costs."""
        if key in self.known:
            work()
        else:
            self.known[key] = counted(work)
        return self.known[key]

    def forward(self, net: "Net", plan: Plan) -> int:
        """One sample through the slice that a plan trains."""
        if not plan.kept:
            return net.macs_forward
        key = ("forward", kept(plan))
        if key not in self.known:
            self.known[key] = net.cut(replace(plan, masks={})).macs_forward
        return self.known[key]


def counted(work: Callable[[], object]) -> int:
    """The multiply-accumulates that a piece of torch code really does."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() // 2


def kept(plan: Plan) -> tuple:
    """What the cost of a plan depends on: how many units of each axis it keeps."""
    return tuple(sorted((axis, len(units)) for axis, units in plan.kept.items()))
