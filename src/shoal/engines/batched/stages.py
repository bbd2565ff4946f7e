"""Stages of a stack's local run: when many devices are done, the others go on in a narrower stack."""

from dataclasses import dataclass

from shoal.engines.batched.stack import DeviceStack

WORTHWHILE_MACS = 1.5e8
"""Multiply-accumulates of a forward pass of all lanes below which a narrower step is not quicker.

On an H200 a step of LeNet takes 0.25 ms and 0.01 ms for every device: 25 devices, as many as this is, double it.
"""
MOST_HALVINGS = 2
"""Every width is a program to be traced and, in long runs, to be compiled."""


@dataclass(frozen=True)
class Stage:
    """The steps from `first` up to `last`, for the first `count` devices in a stack of this width."""

    first: int
    last: int
    count: int
    width: int


def plan_stages(stack: DeviceStack, widest: int, granularity: int, worthwhile_macs: float) -> list[Stage]:
    """Halve the width as soon as half of the lanes are enough; the stack's devices stand in the order of falling steps.

    Widths are halves of the widest stack, so that few programs are traced; stages end at multiples of `granularity`.
    """
    slots, total = stack.slots, stack.step_inputs.steps
    work = stack.batch * stack.setup.net.macs_forward
    stages: list[Stage] = []
    first, count, width = 0, len(slots), stack.width
    for halvings in range(1, 1 + MOST_HALVINGS):
        narrower = -(-widest >> halvings)
        if narrower < 2 or width * work < worthwhile_macs:
            break
        if narrower >= width:
            continue
        done = slots[narrower].steps if narrower < count else first
        last = -(-done // granularity) * granularity
        if last >= total:
            break
        if last > first:
            stages.append(Stage(first, last, count, width))
        first, count, width = max(first, last), min(count, narrower), narrower
    return [*stages, Stage(first, total, count, width)]
