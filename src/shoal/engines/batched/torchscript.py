"""A traced program as TorchScript source, which runs its operations one after the other in C++, without Python."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import getitem
from typing import Any

import torch
from torch import fx

NAMESPACES = ("aten", "shoal_native")
"""Where operations come from that a program may call."""


def compile_torchscript(graph: fx.Graph) -> Callable[..., Any]:
    """The program as a TorchScript function, 1 to 3 us faster per operation; raises where it cannot be written so."""
    import_optimiser_switch()  # without it TorchScript would optimise programs as they run, and round differently
    inputs = [n.name for n in graph.nodes if n.op == "placeholder"]
    lines = [f"def step({', '.join(f'{name}: Tensor' for name in inputs)}):"]
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {node.name} = {write_call(node)}")
        elif node.op == "output":
            lines.append(f"    return {write_argument(node.args[0])}")
        elif node.op != "placeholder":
            raise ValueError(f"a program holds {node.op} {node.target}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.CompilationUnit("\n".join(lines) + "\n").step


def optimized_execution(should_optimize: bool) -> AbstractContextManager:
    """Whether TorchScript optimises programs inside; where torch cannot be told, no program is TorchScript."""
    try:
        return import_optimiser_switch()(should_optimize)
    except (ImportError, AttributeError):
        return nullcontext()


def import_optimiser_switch() -> Callable[[bool], AbstractContextManager]:
    """The private function of torch that turns TorchScript's optimiser on or off."""
    from torch.jit._fuser import optimized_execution as switch

    return switch


def write_call(node: fx.Node) -> str:
    if node.target is getitem:
        return f"{write_argument(node.args[0])}[{node.args[1]}]"
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in NAMESPACES:
        raise ValueError(f"a program calls {node.target}")
    if node.target is torch.ops.aten._to_copy.default and isinstance(node.args[0], (bool, int, float)):
        # vmap leaves this of a number that meets a tensor without dimensions; TorchScript copies tensors only
        return f"torch.ops.aten.scalar_tensor({write_argument(node.args[0])}, dtype={node.kwargs['dtype']})"
    given = [*map(write_argument, node.args), *(f"{key}={write_argument(value)}" for key, value in node.kwargs.items())]
    return f"torch.ops.{node.target.namespace}.{node.target._opname}({', '.join(given)})"


def write_argument(value: Any) -> str:
    """An argument in TorchScript's syntax."""
    match value:
        case fx.Node():
            return value.name
        case torch.device():
            return f'torch.device("{value}")'
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case list() | tuple():
            return f"[{', '.join(map(write_argument, value))}]" if isinstance(value, list) else write_tuple(value)
        case float() if value != value or value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        case None | bool() | int() | float() | str():
            return repr(value)
    raise ValueError(f"a program is given a {type(value).__name__}")


def write_tuple(values: tuple) -> str:
    return f"({', '.join(map(write_argument, values))},)"
