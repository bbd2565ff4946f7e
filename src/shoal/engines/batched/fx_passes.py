"""Passes over the graph of a traced step: it computes the same with fewer operations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
IDENTITY_OPS = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
RESHAPE_OPS = (aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
VIEW_OPS = (*IDENTITY_OPS, *RESHAPE_OPS, aten.unsqueeze.default, aten.squeeze.dims)
TRANSPOSE_OPS = (aten.t.default, aten.transpose.int)


def remove_no_ops(graph: fx.Graph) -> None:
    """Take out what vmap and grad leave behind and what computes nothing."""
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
        elif node.target is aten.mul.Scalar and node.args[1] == 1 and have_same_shape(node, source):
            node.replace_all_uses_with(source)
        elif node.target is aten.where.self and is_ignore_index_check(source) and have_same_shape(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
        else:
            continue
        graph.erase_node(node)
    graph.eliminate_dead_code()


def is_ignore_index_check(condition: fx.Node) -> bool:
    """Whether a condition asks if targets, as they were looked up, are those that torch's losses ignore (-100)."""
    if condition.target is not aten.ne.Scalar or condition.args[1:] != (-100,):
        return False
    source: Any = condition.args[0]
    while isinstance(source, fx.Node) and source.target in VIEW_OPS:
        source = source.args[0]
    looked_up = isinstance(source, fx.Node) and source.target is aten.index_select.default
    return looked_up and source.meta["val"].dtype == torch.int64


def fuse_biases(graph: fx.Graph) -> None:
    """A product and the addition of a bias to it in one operation."""
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        for bias, product in (node.args, node.args[::-1]):
            if isinstance(product, fx.Node) and product.target is aten.bmm.default and len(product.users) == 1:
                if isinstance(bias, fx.Node) and have_same_shape(node, product):
                    with graph.inserting_before(node):
                        made = graph.call_function(aten.baddbmm.default, (bias, *product.args))
                    made.meta = dict(node.meta)
                    node.replace_all_uses_with(made)
                    graph.erase_node(node)
                    break
    graph.eliminate_dead_code()


def fuse_updates(graph: fx.Graph, carried: int) -> None:
    """The last thing a step does is w - lr * update. Do it in place, and where the update is a matrix product nobody
    else reads, let the product be added to w at once: neither the gradient nor a second w is ever written down."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"][:carried]
    ends = list_carried_outputs(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for own, end in zip(inputs, ends):
        if not (isinstance(end, fx.Node) and end.target is aten.addcmul.default and end.args[0] is own):
            continue
        if len(end.users) != 1 or any(place[user] > place[end] for user in own.users):
            continue
        product, lr = end.args[1], end.args[2]
        operands: Any = product.args if isinstance(product, fx.Node) else ()
        scale = end.kwargs.get("value", 1)
        with graph.inserting_before(end):
            fused = FUSED_OPS.get(product.target) if isinstance(product, fx.Node) and len(product.users) == 1 else None
            if fused:
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


def have_same_shape(a: Any, b: Any) -> bool:
    one, two = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (a, b))
    return isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape
