"""Passes over the graph of a traced step: it computes the same with fewer operations."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shoal.engines.batched.fx_cse import may_return_view

aten = torch.ops.aten
IDENTITY_OPS = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
RESHAPE_OPS = (aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
VIEW_OPS = (*IDENTITY_OPS, *RESHAPE_OPS, aten.unsqueeze.default, aten.squeeze.dims)
TRANSPOSE_OPS = (aten.t.default, aten.transpose.int)


def remove_no_ops(graph: fx.Graph, without_ignored: Collection[fx.Node] = ()) -> None:
    """Take out what vmap and grad leave behind and what computes nothing.

    `without_ignored` are inputs in which no number is -100, the target that torch's losses ignore.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            continue
        twin = source.args[0] if source.target == node.target and source.args else None
        if node.target in IDENTITY_OPS or (node.target in RESHAPE_OPS and have_same_shape(node, source)):
            node.replace_all_uses_with(source)
        elif node.target in TRANSPOSE_OPS and isinstance(twin, fx.Node) and node.args[1:] == source.args[1:]:
            node.replace_all_uses_with(twin)
        elif node.target is aten.mul.Scalar and node.args[1] == 1 and have_same_form(node, source):
            node.replace_all_uses_with(source)
        elif is_ignore_check(node, without_ignored) and have_same_shape(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
        else:
            continue
        graph.erase_node(node)
    graph.eliminate_dead_code()


def is_ignore_check(node: fx.Node, without_ignored: Collection[fx.Node]) -> bool:
    """Whether a choice depends on which of the numbers that were looked up in such an input are -100: none of them."""
    condition: Any = node.args[0] if node.target is aten.where.self else None
    if not isinstance(condition, fx.Node) or condition.target is not aten.ne.Scalar or condition.args[1:] != (-100,):
        return False
    source: Any = condition.args[0]
    while isinstance(source, fx.Node) and source.target in VIEW_OPS:
        source = source.args[0]
    looked_up = isinstance(source, fx.Node) and source.target is aten.index_select.default
    return looked_up and source.args[0] in without_ignored


def fuse_biases(graph: fx.Graph) -> None:
    """A product and the addition of a bias to it in one operation."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        for bias, product in (node.args, node.args[::-1]):
            if isinstance(product, fx.Node) and product.target is aten.bmm.default and len(product.users) == 1:
                if isinstance(bias, fx.Node) and have_same_shape(node, product) and have_same_type(bias, product):
                    with graph.inserting_before(node):
                        made = graph.call_function(aten.baddbmm.default, (bias, *product.args))
                    made.meta = dict(node.meta)
                    node.replace_all_uses_with(made)
                    graph.erase_node(node)
                    break
    graph.eliminate_dead_code()


def fuse_updates(graph: fx.Graph, carried: int) -> None:
    """The last thing a step does is w - lr * update. Do it in place, and where the update is a matrix product nobody
    else reads, let the product be added to w at once: neither the gradient nor a second w is ever written down.

    A weight is overwritten only after everything else has read it, also by way of a view. A product that reads weights
    itself, as the gradients of two factors do, is computed before any of them is overwritten.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"][:carried]
    place = {node: i for i, node in enumerate(graph.nodes)}
    memory = find_shared_memory(graph, inputs)
    readers = find_readers(memory)
    for own, end in zip(inputs, list_carried_outputs(graph)):
        if not (isinstance(end, fx.Node) and end.target is aten.addcmul.default and end.args[0] is own):
            continue
        update: Any = end.args[1]
        lr = end.args[2]
        if len(end.users) != 1 or any(place[user] > place[end] for user in readers[own]):
            continue
        if update is not own and own in memory.get(update, ()):
            continue
        operands: Any = update.args if isinstance(update, fx.Node) else ()
        scale = end.kwargs.get("value", 1)
        with graph.inserting_before(end):
            fused = FUSED_OPS.get(update.target) if isinstance(update, fx.Node) and len(update.users) == 1 else None
            if fused and not any(memory.get(operand) for operand in operands):
                left, right = operands
                if left.meta["val"].numel() <= right.meta["val"].numel():
                    left = scale_by_rate(graph, left, lr)
                else:
                    right = scale_by_rate(graph, right, lr)
                done = graph.call_function(fused, (own, left, right), {"alpha": scale})
            else:
                done = graph.call_function(aten.addcmul_.default, end.args, dict(end.kwargs))
        done.meta = dict(end.meta)
        end.replace_all_uses_with(done)
        graph.erase_node(end)


def find_shared_memory(graph: fx.Graph, inputs: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """By node, the inputs of which it may be a view; each input is one of itself."""
    memory = {node: {node} for node in inputs}
    for node in graph.nodes:
        if node.op == "call_function" and (may_return_view(node.target) or node.target in VIEW_OPS):
            if found := set().union(*(memory.get(source, ()) for source in node.all_input_nodes)):
                memory[node] = found
    return memory


def find_readers(memory: dict[fx.Node, set[fx.Node]]) -> dict[fx.Node, list[fx.Node]]:
    """By input, what reads it or a view of it."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node, sources in memory.items():
        for source in sources:
            readers.setdefault(source, []).extend(node.users)
    return readers


def scale_by_rate(graph: fx.Graph, factor: fx.Node, lr: Any) -> fx.Node:
    scaled = graph.call_function(aten.mul.Tensor, (factor, lr))
    scaled.meta = dict(
        factor.meta
    )  # a product with a number has the shape and the strides of what it is multiplied with
    return scaled


FUSED_OPS: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def list_carried_outputs(graph: fx.Graph) -> Sequence[Any]:
    """What a program carries on."""
    made = next(n for n in graph.nodes if n.op == "output").args[0]
    return made[0] if isinstance(made, (tuple, list)) else ()


def have_same_form(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors have the same shape, type and strides: what follows one, as a view, can follow the other."""
    return have_same_shape(a, b) and have_same_type(a, b) and a.meta["val"].stride() == b.meta["val"].stride()


def have_same_type(a: fx.Node, b: fx.Node) -> bool:
    one, two = (n.meta.get("val") for n in (a, b))
    return isinstance(one, Tensor) and isinstance(two, Tensor) and one.dtype == two.dtype


def have_same_shape(a: Any, b: Any) -> bool:
    one, two = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (a, b))
    return isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape
