"""Traced graphs as JSON: plain tensor operations by name, their arguments, and the shapes of what they give.

Nothing is pickled, and nothing but operations on tensors of torch's own library `aten` can be read back.
"""

import json
from keyword import iskeyword
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from shoal.engines.batched.tensor_outline import make_outline

NAMED_TYPES = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
"""Values that are attributes of torch, by the name under which they are written."""
FILE_OPS = ("from_file",)
"""Operations that read files."""


def encode_graph(graph: fx.Graph) -> str:
    """The graph as JSON; raises ValueError where it holds anything but plain operations on its inputs."""
    if type(graph._codegen) is not CodeGen:
        raise ValueError("the graph is called in a way of its own")
    return json.dumps([encode_node(node) for node in graph.nodes], separators=(",", ":"))


def decode_graph(text: str) -> fx.GraphModule:
    """The graph that `encode_graph` wrote; raises ValueError for anything else."""
    graph, nodes = fx.Graph(), {}
    try:
        for name, op, target, args, kwargs, value in json.loads(text):
            if not name.isidentifier() or iskeyword(name):
                raise ValueError(f"a node is called {name}")
            args = tuple(decode_argument(argument, nodes) for argument in args)
            kwargs = {str(key): decode_argument(argument, nodes) for key, argument in kwargs.items()}
            if op == "placeholder":
                node = graph.placeholder(name)
            elif op == "call_function":
                node = graph.create_node(op, find_operation(target), args, kwargs, name)
            elif op == "output":
                node = graph.output(args[0])
            else:
                raise ValueError(f"a node is a {op}")
            node.meta["val"] = decode_value(value)
            nodes[name] = node
        graph.lint()
        return fx.GraphModule(nn.Module(), graph)
    except (TypeError, KeyError, IndexError, AttributeError, AssertionError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not a graph: {error}") from error


def encode_node(node: fx.Node) -> list[Any]:
    if node.op not in ("placeholder", "call_function", "output"):
        raise ValueError(f"the graph holds {node.op} {node.target}")
    target = name_operation(node.target) if node.op == "call_function" else ""
    kwargs = {key: encode_argument(value) for key, value in node.kwargs.items()}
    return [node.name, node.op, target, [*map(encode_argument, node.args)], kwargs, encode_value(node.meta.get("val"))]


def name_operation(operation: Any) -> str:
    if operation is getitem:
        return "getitem"
    if not isinstance(operation, torch._ops.OpOverload) or find_operation(str(operation)) is not operation:
        raise ValueError(f"the graph calls {operation}")
    return str(operation)


def find_operation(name: str) -> Any:
    """The operation of a name like `aten.mm.default`."""
    if name == "getitem":
        return getitem
    library, packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    if library != "aten" or packet in FILE_OPS:
        raise ValueError(f"{name} is no operation that may be called")
    return operation


def encode_argument(value: Any) -> Any:
    """A plain value as it is; what JSON does not know as a dict of one key, which says what it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):
        return {"tuple": [*map(encode_argument, value)]}
    if isinstance(value, list):
        return [*map(encode_argument, value)]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in NAMED_TYPES.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    raise ValueError(f"an argument is a {type(value).__name__}")


def decode_argument(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [decode_argument(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "tuple":
        return tuple(decode_argument(item, nodes) for item in content)
    if kind == "device":
        return torch.device(content)
    found = getattr(torch, content)
    if not isinstance(found, NAMED_TYPES[kind]):
        raise ValueError(f"{content} is no {kind}")
    return found


def encode_value(value: Any) -> Any:
    """Shape, strides, type and device of what an operation gives: all that passes over a graph ask for."""
    if isinstance(value, Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype).removeprefix("torch."), str(value.device)]
    if isinstance(value, (list, tuple)):
        return {"several": [*map(encode_value, value)]}
    return None


def decode_value(value: Any) -> Any:
    if isinstance(value, dict):
        return [*map(decode_value, value["several"])]
    if value is None:
        return None
    shape, stride, dtype, device = value
    return make_outline(shape, stride, decode_argument({"dtype": dtype}, {}), torch.device(device))
