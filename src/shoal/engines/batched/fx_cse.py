"""Common subexpressions of a traced step, by a pass that is a private interface of torch."""

from operator import getitem
from typing import Any

from torch import fx

from shoal.core.model.torch_fallback import log_fallback


def share_subexpressions(graph: fx.Graph) -> fx.Graph:
    """What is computed twice is computed once; not where anything is overwritten on the way."""
    if any(is_mutating(n.target) for n in graph.nodes if n.op == "call_function"):
        return graph
    try:
        from torch._functorch.compile_utils import fx_graph_cse

        return fx_graph_cse(graph)
    except Exception:  # the graph that it was given is as it was
        log_fallback("torch._functorch.compile_utils.fx_graph_cse", "a step computes some things twice")
        return graph


def is_mutating(operation: Any) -> bool:
    """Whether an operation overwrites what it is given; one that does not say so counts as if it did."""
    schema = getattr(operation, "_schema", None)
    return operation is not getitem if schema is None else schema.is_mutable
