"""A training step as a flat program of tensor operations, traced once and run many times.

`advance` is written for people: parts, dicts, closures, a gradient. Tracing it (`fx_trace`) leaves what it computes,
gradient included, as a list of plain operations on a flat list of tensors. For many devices the step is traced under
`vmap`; for one alone it is traced as it is. What is found out here (which tensors are read at all, what a step holds in
memory at its peak) is what cohorts are cut by.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.core.losses import IGNORED_TARGET
from shoal.core.model.made_bytes import count_made_bytes
from shoal.core.model.torch_fallback import log_fallback
from shoal.engines.batched.fx_cse import share_subexpressions
from shoal.engines.batched.fx_passes import fuse_biases, fuse_updates, remove_no_ops
from shoal.engines.batched.fx_trace import Trace, trace_function
from shoal.engines.batched.gpu_conv import choose_convolution_forms
from shoal.engines.batched.native_ops import use_native_kernels
from shoal.engines.batched.torchscript import compile_torchscript
from shoal.engines.batched.trace_checks import refuse_unrepeatable_operations

log = logging.getLogger("shoal")

StepFunction = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]
"""(carried from step to step, fixed for the run, of this step) -> carried on, loss of every device."""


@dataclass(frozen=True, eq=False)
class StepProgram:
    """A traced step."""

    module: nn.Module
    reads: tuple[bool, ...]
    """Which of the fixed tensors matter; the others need not even be stacked."""
    peak: int
    """Bytes of all that a step makes and that is alive at one time."""
    call: Callable[..., tuple[list[Tensor], Tensor]]

    def __call__(self, *flat: Tensor) -> tuple[list[Tensor], Tensor]:
        return self.call(*flat)


def trace_step(
    step: StepFunction,
    carried: list[Tensor],
    fixed: list[Tensor],
    frame: list[Tensor],
    in_place: bool,
    fake: bool = False,
    native: bool = False,
    trace: Trace = trace_function,
    width: int = 1,
) -> StepProgram:
    """The program of a step, from an example of its tensors; `in_place`: it may overwrite what is carried.

    With `fake` nothing is computed: enough to see what a step would take. With `native` some operations are left to
    kernels of our own. A step of a stack is of `width` devices.
    """
    ends = (len(carried), len(carried) + len(fixed))

    def call_step(*tensors: Tensor):
        return step(list(tensors[: ends[0]]), list(tensors[ends[0] : ends[1]]), list(tensors[ends[1] :]))

    example = [t.detach() for t in (*carried, *fixed, *frame)]
    module = trace(call_step, example, fake)
    if module is None:
        return run_untraced(call_step, example, len(fixed))
    refuse_unrepeatable_operations(module.graph)
    remove_no_ops(module.graph, find_inputs_without_ignored(module.graph, example))
    graph = share_subexpressions(module.graph)
    fuse_biases(graph)
    if in_place:
        fuse_updates(graph, len(carried))
        graph.eliminate_dead_code()
        if native:
            use_native_kernels(graph)
    else:
        choose_convolution_forms(graph, width)
    inputs = [n for n in graph.nodes if n.op == "placeholder"][ends[0] : ends[1]]
    reads = tuple(bool(n.users) for n in inputs)
    for node, read in zip(inputs, reads):
        if not read:
            graph.erase_node(node)
    module.graph = graph
    return StepProgram(
        module, reads, compute_peak_bytes(graph), pick_fastest_call(module) if in_place else module.forward
    )


def find_inputs_without_ignored(graph: fx.Graph, example: list[Tensor]) -> set[fx.Node]:
    """The inputs of whole numbers (a data set's targets) in which there is no -100, which torch's losses ignore."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return {
        node
        for node, tensor in zip(inputs, example)
        if tensor.dtype == torch.int64 and not bool(tensor.eq(IGNORED_TARGET).any())
    }


def run_untraced(call_step: Callable[..., Any], example: list[Tensor], fixed: int) -> StepProgram:
    """A step that is called as it is written, after it was run once: does it run at all, and what does it make?"""
    with torch.no_grad():
        _, made_bytes = count_made_bytes(lambda: call_step(*example))
    module = UntracedStep(call_step)
    return StepProgram(module, (True,) * fixed, made_bytes, module.forward)


class UntracedStep(nn.Module):
    """A step where torch cannot trace, in the form of one that was traced."""

    def __init__(self, call_step: Callable[..., Any]):
        super().__init__()
        self.call_step = call_step

    def forward(self, *tensors: Tensor) -> Any:
        return self.call_step(*tensors)


def pick_fastest_call(module: fx.GraphModule) -> Callable[..., tuple[list[Tensor], Tensor]]:
    """A program as TorchScript where that can be had, else as the Python that was traced."""
    try:
        return compile_torchscript(module.graph)
    except (ImportError, AttributeError):
        log_fallback("torch.jit", "steps run in Python")
        return module.forward
    except Exception as error:
        log.debug("a program stays in Python: %s", error)
        return module.forward


def compute_peak_bytes(graph: fx.Graph) -> int:
    """The most bytes that what a program makes (not what it is given, nor views of that) takes up at one time."""
    given: set[fx.Node] = set()
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(graph.nodes):
        for source in node.all_input_nodes:
            last[source] = at
    alive = most = 0
    leaving: dict[int, int] = {}
    for at, node in enumerate(graph.nodes):
        if node.op == "placeholder" or (returns_view(node) and node.all_input_nodes[0] in given):
            given.add(node)
        elif node.op == "call_function":
            size = count_value_bytes(node.meta.get("val"))
            alive += size
            leaving[last.get(node, at)] = leaving.get(last.get(node, at), 0) + size
        most = max(most, alive)
        alive -= leaving.pop(at, 0)
    return most


def returns_view(node: fx.Node) -> bool:
    """Whether an operation returns its first input in another shape, without a copy."""
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def count_value_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(count_value_bytes, value)) if isinstance(value, (tuple, list)) else 0
