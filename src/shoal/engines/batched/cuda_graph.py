"""Several steps of a program as one CUDA graph: recorded once over buffers that stay where they are, then replayed."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.errors import describe_error
from shoal.engines.batched.graph import StepProgram

log = logging.getLogger("shoal")

DEFAULT_GRAPH_STEPS = 25
"""Steps of a graph, where nothing speaks for another number."""


class GraphReplay:
    """A recorded stretch of steps."""

    def __init__(
        self,
        program: StepProgram,
        carried: Sequence[Tensor],
        fixed: Sequence[Tensor],
        data: Sequence[Tensor],
        frames,
        pool,
    ):
        self.carried, self.fixed, self.frames = ([t.clone() for t in own] for own in (carried, fixed, frames))
        self.losses = torch.zeros_like(program(*carried, *fixed, *data, *(f[0] for f in frames))[1])
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                program(*self.carried, *self.fixed, *data, *(f[0] for f in self.frames))
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph, pool=pool):
            now = self.carried
            for step in range(len(self.frames[0])):
                now, loss = program(*now, *self.fixed, *data, *(f[step] for f in self.frames))
                self.losses.add_(loss)
            for own, new in zip(self.carried, now):
                own.copy_(new)

    def load_stack(self, carried: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        """Another cohort begins."""
        copy_into(self.carried, carried)
        copy_into(self.fixed, fixed)
        self.losses.zero_()

    def replay_steps(self, frames: Sequence[Tensor]) -> None:
        """The next steps of it."""
        copy_into(self.frames, frames)
        self.graph.replay()


def record_graph(program: StepProgram, *given) -> GraphReplay:
    """A program as a graph; where it cannot be compiled, as it was traced."""
    try:
        return GraphReplay(program, *given)
    except Exception as error:
        if is_out_of_memory(error) or program.call == program.module.forward:
            raise
        log.warning("A step cannot be compiled (%s); it runs as it was traced, which is slower.", describe_error(error))
        return GraphReplay(replace(program, call=program.module.forward), *given)


def is_out_of_memory(error: Exception) -> bool:
    """Whether that is what an error says; where CUDA itself has no room left, torch names it in words only."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def copy_into(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if own:
        torch._foreach_copy_(list(own), list(given))  # pyright: ignore[reportPrivateImportUsage]


def pick_graph_steps(steps: int, even: bool) -> int:
    """How many steps to record: without a rest where every lane is full, else a number that seldom changes."""
    if not even:
        return DEFAULT_GRAPH_STEPS if steps > 16 else 1 << (steps - 1).bit_length()
    if steps <= DEFAULT_GRAPH_STEPS:
        return steps
    return max((n for n in range(16, 33)), key=lambda n: (-(-steps % n), n))
