"""What is not as declared is found, and told in words; what is, passes."""

from math import inf, nan
from typing import Any

import pytest
import torch

from shoal.core.extras import Extra, find_fault
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.wire import pack_bits
from shoal.plugins.smoke_run import build_tiny_net

NET = build_tiny_net()
CUT = Plan({"a": torch.tensor([0, 2])})
PARAMS = {k: v.clone() for k, v in NET.initial.items()}
HELD, COUNTS = pack_bits(torch.tensor([True, False])), torch.tensor([3, 0], dtype=torch.int32)
ROWS = {"held": Extra("bits", length=2), "means": Extra("tensor", shape=(None, 3), rows="held")}


@pytest.mark.parametrize(
    ("extra", "value"),
    [
        (Extra(), torch.tensor(1.5)),
        (Extra(kind="int", low=0), torch.tensor(7)),
        (Extra(kind="bool"), torch.tensor(True)),
        (Extra("params"), PARAMS),
        (Extra("axes"), {"a": torch.ones(3)}),
        (Extra("classes", "int", low=0), COUNTS),
        (Extra("bits", length=12), torch.tensor([255, 240], dtype=torch.uint8)),
        (Extra("tensor", shape=(None, 2)), torch.zeros(5, 2)),
        (Extra("tensor", shape=(None, 2)), torch.zeros(0, 2)),
    ],
    ids=lambda case: case.like if isinstance(case, Extra) else "",
)
def test_what_is_as_declared_passes(extra: Extra, value: Any):
    assert find_fault({"x": value}, {"x": extra}, (), NET, WHOLE_MODEL) == ""


@pytest.mark.parametrize(
    ("extra", "value", "words"),
    [
        (Extra(), 1.5, "is no tensor"),
        (Extra(), torch.ones(1), "has the shape (1,) and not one number"),
        (Extra(), torch.tensor(1), "holds int64 and not float"),
        (Extra(), torch.tensor(nan), "has numbers outside"),
        (Extra(), torch.tensor(-inf), "has numbers outside"),
        (Extra(), torch.tensor(1e38), "has numbers outside"),
        (Extra(low=0), torch.tensor(-0.1), "has numbers outside 0 to"),
        (Extra(high=1), torch.tensor(1.1), "to 1"),
        (Extra(kind="int"), torch.tensor(True), "holds bool and not int"),
        (Extra(kind="float32"), torch.tensor(1.0, dtype=torch.float64), "holds float64 and not float32"),
        (Extra("params"), PARAMS | {"a.bias": PARAMS["a.bias"].float()}, "a.bias holds float32 and not float64"),
        (Extra("params"), {"a.bias": PARAMS["a.bias"]}, "names of the parameters"),
        (Extra("params"), [1], "names of the parameters"),
        (Extra("axes"), {"a": torch.ones(2)}, "a has the shape (2,) and not 3"),
        (Extra("axes"), {"b": torch.ones(3)}, "names of the axes"),
        (Extra("classes", "int", low=0), -COUNTS, "has numbers outside 0 to"),
        (Extra("bits", length=12), torch.zeros(3, dtype=torch.uint8), "has the shape (3,) and not 2"),
        (Extra("tensor", shape=(None, 2), most=8), torch.zeros(5, 2), "has 10 elements, more than 8"),
    ],
)
def test_what_is_not_is_told_in_words(extra: Extra, value: Any, words: str):
    assert words in find_fault({"x": value}, {"x": extra}, (), NET, WHOLE_MODEL)


def test_a_plan_cuts_what_is_like_the_model():
    cut, units = NET.slicer.take(PARAMS, CUT), {"a": torch.ones(2)}
    declared = {"x": Extra("params"), "y": Extra("axes")}
    assert find_fault({"x": cut, "y": units}, declared, (), NET, CUT) == ""
    assert "a.weight has the shape (3, 4) and not 2 x 4" in find_fault(
        {"x": PARAMS, "y": units}, declared, (), NET, CUT
    )


def test_what_nobody_asked_for_is_a_fault_and_so_is_silence_when_asked():
    declared = {"x": Extra(when="please"), "y": Extra(when="please", optional=True)}
    assert find_fault({}, declared, (), NET, WHOLE_MODEL) == ""
    assert find_fault({}, declared, ("please",), NET, WHOLE_MODEL) == "'x' is missing"
    assert find_fault({"x": torch.ones(())}, declared, (), NET, WHOLE_MODEL) == "'x': nobody asked for it"
    assert find_fault({"x": torch.ones(())}, declared, ("please",), NET, WHOLE_MODEL) == ""
    assert find_fault({"z": 1}, declared, (), NET, WHOLE_MODEL) == "'z' is none of its extras"
    assert find_fault(None, declared, (), NET, WHOLE_MODEL) == "they are no dict of names"


def test_rows_are_as_many_as_another_extra_says():
    assert find_fault({"held": HELD, "means": torch.ones(1, 3)}, ROWS, (), NET, WHOLE_MODEL) == ""
    two = {"held": HELD, "means": torch.ones(2, 3)}
    assert find_fault(two, ROWS, (), NET, WHOLE_MODEL) == "'means': it has 2 rows, and 'held' says 1"
    padded = {"held": HELD | 1, "means": torch.ones(2, 3)}
    assert "says 1" in find_fault(padded, ROWS, (), NET, WHOLE_MODEL)


def test_a_declaration_of_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="like = 'model'"):
        Extra("model")
    with pytest.raises(ValueError, match="kind = 'real'"):
        Extra(kind="real")
    with pytest.raises(ValueError, match="crowd = 'median'"):
        Extra(crowd="median")
