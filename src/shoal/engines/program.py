"""A training step as a flat program of tensor operations, traced once and run many times.

`advance` is written for people: parts, dicts, closures, a gradient. Tracing it with `make_fx` leaves what it computes,
gradient included, as a list of plain operations on a flat list of tensors. For many devices the step is traced under
`vmap`; for one alone it is traced as it is. What is found out here (which tensors are read at all, what a step holds in
memory at its peak) is what cohorts are cut by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

Step = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], Tensor]]
"""(carried from step to step, fixed for the run, of this step) -> carried on, loss of every device."""

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
LIKE = (aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default)
TURN = (aten.t.default, aten.transpose.int)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step."""

    module: fx.GraphModule
    carried: int
    reads: tuple[bool, ...]
    """Which of the fixed tensors matter; the others need not even be stacked."""
    peak: int
    """Bytes of all that a step makes and that is alive at one time."""
    call: Callable[..., tuple[list[Tensor], Tensor]]

    def __call__(self, *flat: Tensor) -> tuple[list[Tensor], Tensor]:
        return self.call(*flat)


def traced(
    step: Step, carried: list[Tensor], fixed: list[Tensor], frame: list[Tensor], in_place: bool, fake: bool = False
) -> Program:
    """The program of a step, from an example of its tensors; `in_place`: it may overwrite what is carried.

    With `fake` nothing is computed: enough to see what a step would take.
    """
    ends = (len(carried), len(carried) + len(fixed))

    def flat(*tensors: Tensor):
        return step(list(tensors[: ends[0]]), list(tensors[ends[0] : ends[1]]), list(tensors[ends[1] :]))

    with torch.no_grad():
        module = make_fx(flat, tracing_mode="fake" if fake else "real")(
            *(t.detach() for t in (*carried, *fixed, *frame))
        )
    graph = module.graph
    tidy(graph)
    if in_place:
        fuse_updates(graph, len(carried))
        graph.eliminate_dead_code()
    inputs = [n for n in graph.nodes if n.op == "placeholder"][ends[0] : ends[1]]
    reads = tuple(bool(n.users) for n in inputs)
    for node, read in zip(inputs, reads):
        if not read:
            graph.erase_node(node)
    module.recompile()
    return Program(module, len(carried), reads, peak_of(graph), module.forward)


def tidy(graph: fx.Graph) -> None:
    """Take out what vmap and grad leave behind and what computes nothing."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            continue
        twin = source.args[0] if source.target == node.target and source.args else None
        if node.target in SAME or (node.target in LIKE and same_shape(node, source)):
            node.replace_all_uses_with(source)
        elif node.target in TURN and isinstance(twin, fx.Node) and node.args[1:] == source.args[1:]:
            node.replace_all_uses_with(twin)
        elif node.target is aten.mul.Scalar and node.args[1] == 1 and same_shape(node, source):
            node.replace_all_uses_with(source)
        else:
            continue
        graph.erase_node(node)
    graph.eliminate_dead_code()


def fuse_updates(graph: fx.Graph, carried: int) -> None:
    """The last thing a step does is w - lr * update. Do it in place, and where the update is a matrix product nobody
    else reads, let the product be added to w at once: neither the gradient nor a second w is ever written down."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"][:carried]
    ends = output_of(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for own, end in zip(inputs, ends):
        if not (isinstance(end, fx.Node) and end.target is aten.addcmul.default and end.args[0] is own):
            continue
        if len(end.users) != 1 or any(place[user] > place[end] for user in own.users):
            continue
        product, lr = end.args[1], end.args[2]
        scale = end.kwargs.get("value", 1)
        with graph.inserting_before(end):
            fused = FUSED.get(product.target) if isinstance(product, fx.Node) and len(product.users) == 1 else None
            if fused:
                left, right = product.args
                if left.meta["val"].numel() <= right.meta["val"].numel():
                    left = graph.call_function(aten.mul.Tensor, (left, lr))
                else:
                    right = graph.call_function(aten.mul.Tensor, (right, lr))
                done = graph.call_function(fused, (own, left, right), {"alpha": scale})
            else:
                done = graph.call_function(aten.addcmul_.default, end.args, dict(end.kwargs))
        done.meta = dict(end.meta)
        end.replace_all_uses_with(done)
        graph.erase_node(end)


FUSED = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def output_of(graph: fx.Graph) -> Sequence[Any]:
    """What a program carries on."""
    made = next(n for n in graph.nodes if n.op == "output").args[0]
    return made[0] if isinstance(made, (tuple, list)) else ()


def peak_of(graph: fx.Graph) -> int:
    """The most bytes that what a program makes (not what it is given) takes up at one time."""
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(graph.nodes):
        for source in node.all_input_nodes:
            last[source] = at
    alive = most = 0
    leaving: dict[int, int] = {}
    for at, node in enumerate(graph.nodes):
        if node.op == "call_function":
            size = bytes_of(node.meta.get("val"))
            alive += size
            leaving[last.get(node, at)] = leaving.get(last.get(node, at), 0) + size
        most = max(most, alive)
        alive -= leaving.pop(at, 0)
    return most


def bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, (tuple, list)) else 0


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    one, two = a.meta.get("val"), b.meta.get("val")
    return isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape
