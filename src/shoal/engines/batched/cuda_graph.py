"""Several local steps as one CUDA graph: recorded once over fixed buffers, then replayed for every stack of devices."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.errors import describe_error
from shoal.core.model.foreach import copy_into_each
from shoal.engines.batched.graph import StepProgram

log = logging.getLogger("shoal")

DEFAULT_GRAPH_STEPS = 25
"""Steps of a graph, where no other number divides the steps better."""


class GraphReplay:
    """A recorded CUDA graph of several steps, and the buffers that it reads and writes."""

    def __init__(
        self,
        program: StepProgram,
        carried: Sequence[Tensor],
        fixed: Sequence[Tensor],
        data: Sequence[Tensor],
        step_inputs,
        pool,
    ):
        self.data = list(data)
        """What the graph reads where it lies: it must not be freed before the graph."""
        self.carried, self.fixed, self.step_inputs = (
            [t.clone() for t in tensors] for tensors in (carried, fixed, step_inputs)
        )
        self.losses = torch.zeros_like(program(*carried, *fixed, *data, *(t[0] for t in step_inputs))[1])
        self.graph = torch.cuda.CUDAGraph()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(2):
                program(*self.carried, *self.fixed, *data, *(t[0] for t in self.step_inputs))
        torch.cuda.current_stream().wait_stream(side_stream)
        with torch.cuda.graph(self.graph, pool=pool):
            state = self.carried
            for step in range(len(self.step_inputs[0])):
                state, loss = program(*state, *self.fixed, *data, *(t[step] for t in self.step_inputs))
                self.losses.add_(loss)
            for buffer, new in zip(self.carried, state):
                buffer.copy_(new)

    def load_stack(self, carried: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        """Copy another stack of devices into the buffers, and set their losses to zero."""
        copy_into_each(self.carried, carried)
        copy_into_each(self.fixed, fixed)
        self.losses.zero_()

    def replay_steps(self, step_inputs: Sequence[Tensor]) -> None:
        """Run the next steps on these inputs, which have the steps as first dimension."""
        copy_into_each(self.step_inputs, step_inputs)
        self.graph.replay()


def record_graph(program: StepProgram, *buffers) -> GraphReplay:
    """The CUDA graph of a program; where torch.compile fails, that of the program as it was traced."""
    try:
        return GraphReplay(program, *buffers)
    except Exception as error:
        if is_out_of_memory(error) or program.call == program.module.forward:
            raise
        log.warning("A step cannot be compiled (%s); it runs as it was traced, which is slower.", describe_error(error))
        return GraphReplay(replace(program, call=program.module.forward), *buffers)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that GPU memory ran out; for some of them torch has no class of its own, only words."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def pick_graph_steps(steps: int, is_full: bool) -> int:
    """How many steps to record: without a rest where no step is padded, else a number that seldom changes."""
    if not is_full:
        return DEFAULT_GRAPH_STEPS if steps > 16 else 1 << (steps - 1).bit_length()
    if steps <= DEFAULT_GRAPH_STEPS:
        return steps
    return max((n for n in range(16, 33)), key=lambda n: (-(-steps % n), n))
