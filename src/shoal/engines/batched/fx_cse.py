"""Common subexpressions of a traced step: what is computed twice is computed once."""

from collections.abc import Hashable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx


def share_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The graph, in which equal operations on equal inputs are one; not where anything is overwritten on the way.

    What a program returns stays what it is: two outputs never become one tensor, which the next step would write twice.
    """
    operations = [node for node in graph.nodes if node.op == "call_function"]
    if any(is_mutating(node.target) for node in operations):
        return graph
    returned = find_returned_nodes(graph)
    known: dict[Hashable, fx.Node] = {}
    for node in operations:
        if node in returned or is_random(node.target):
            continue
        key = (node.target, make_argument_key(node.args), make_argument_key(node.kwargs))
        twin = known.setdefault(key, node)
        if twin is not node:
            node.replace_all_uses_with(twin)
            graph.erase_node(node)
    return graph


def make_argument_key(value: Any) -> Hashable:
    """What two arguments must have in common to be the same; 1, 1.0 and True are not."""
    if isinstance(value, Mapping):
        return tuple((name, make_argument_key(item)) for name, item in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(make_argument_key, value))
    return (type(value), repr(value) if isinstance(value, float) else value)


def find_returned_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What a program returns, and what that is a view of."""
    output = next(node for node in graph.nodes if node.op == "output")
    returned, remaining = set(), list(output.all_input_nodes)
    while remaining:
        node = remaining.pop()
        if node not in returned:
            returned.add(node)
            remaining += node.all_input_nodes if may_return_view(node.target) else ()
    return returned


def may_return_view(operation: Any) -> bool:
    """Whether a result of an operation may lie in the memory of one of its inputs."""
    schema = getattr(operation, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def is_random(operation: Any) -> bool:
    """Whether an operation gives another result at every call; what is left uninitialised counts as such."""
    tags = getattr(operation, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or "empty" in getattr(operation, "__name__", "")


def is_mutating(operation: Any) -> bool:
    """Whether an operation overwrites what it is given; one that does not say so counts as if it did."""
    schema = getattr(operation, "_schema", None)
    return operation is not getitem if schema is None else schema.is_mutable
