"""Traced graphs as JSON: what comes back is what was written, and anything else is refused."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.engines.batched.graph_json import decode_graph, encode_graph

X = torch.arange(24.0).view(2, 3, 4)


def use_many_arguments(x: Tensor, y: Tensor):
    """Lists, tuples, types, devices, memory formats, infinities, several results, and writing in place."""
    big, places = x.max(-1)
    same = x.to(torch.float64).clone(memory_format=torch.contiguous_format).clamp(min=-float("inf"))
    parts = torch.split(y, [1, 2], 1)
    made = torch.zeros(3, device=x.device).add_(parts[1].sum())
    return [big + places, same.sum((0, 1))], (made * float("inf")).nan_to_num() + parts[0].mean()


def trace(function, *example: Tensor) -> fx.GraphModule:
    return make_fx(function)(*example)


def test_a_graph_comes_back_as_it_was():
    module = trace(use_many_arguments, X, X + 1)
    text = encode_graph(module.graph)
    again = decode_graph(text)
    assert again.code == module.code and encode_graph(again.graph) == text
    for ours, theirs in zip(again(X, X + 1)[0], module(X, X + 1)[0]):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(again.graph.nodes, module.graph.nodes):
        value, wanted = ours.meta["val"], theirs.meta.get("val")
        if isinstance(wanted, Tensor):
            assert (value.shape, value.stride(), value.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
            assert value.device == wanted.device and value.nbytes == wanted.nbytes
            assert value.is_contiguous() == wanted.is_contiguous() and value.sum(0).shape == wanted.sum(0).shape


def test_what_is_no_plain_operation_is_not_written():
    constant = torch.randn(3)
    with pytest.raises(ValueError, match="get_attr"):
        encode_graph(trace(lambda x: x.sum() + constant, X).graph)
    graph = fx.Graph()
    graph.output(graph.call_function(print, (graph.placeholder("x"),)))
    with pytest.raises(ValueError, match="print"):
        encode_graph(graph)


NODES = json.loads(encode_graph(trace(lambda x: (x.sin() * 2,), X).graph))


def replace_in_node(place: int, value: object) -> str:
    """The graph of two operations with something else at one place of its second node."""
    return json.dumps([NODES[0], [*NODES[1][:place], value, *NODES[1][place + 1 :]], *NODES[2:]])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "7",
        "[[]]",
        json.dumps(NODES[1:]),
        replace_in_node(0, "x): import os #"),
        replace_in_node(0, "while"),
        replace_in_node(1, "call_module"),
        replace_in_node(1, "get_attr"),
        replace_in_node(2, "aten.from_file.default"),
        replace_in_node(2, "os.system.default"),
        replace_in_node(2, "aten.__class__.mro"),
        replace_in_node(3, [{"node": "nobody"}]),
        replace_in_node(3, [{"dtype": "load"}]),
        replace_in_node(3, [{"pickle": "x"}]),
        replace_in_node(5, [[-1], [1], "float32", "cpu"]),
        replace_in_node(5, [[1], [1], "float32", "nowhere"]),
    ],
)
def test_what_is_no_graph_is_refused(text):
    with pytest.raises(ValueError):
        decode_graph(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.sampled_from(["", "sin", "aten.sin.default"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["node", "tuple", "x"]), inner),
    max_leaves=8,
)


@given(st.sampled_from(range(len(NODES))), st.sampled_from(range(6)), json_values)
def test_a_graph_with_anything_else_at_a_place_is_a_graph_or_is_refused(number, place, value):
    nodes = json.loads(json.dumps(NODES))
    nodes[number][place] = value
    try:
        decode_graph(json.dumps(nodes)).graph.lint()
    except ValueError:
        pass
