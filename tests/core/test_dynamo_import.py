"""Functions that torch keeps out of compiled code, called where dynamo is not imported and where it is."""

import sys

import torch
from torch._compile import _disable_dynamo

from shoal.core.model.dynamo_import import MARK, call_without_dynamo


def make_marked_function(calls: list[str]):
    """A function in the form that torch gives to those that it keeps out of compiled code."""

    def inner():
        calls.append("inner")

    return _disable_dynamo(inner), inner


def test_without_dynamo_the_function_itself_is_called_and_left_as_it_was(monkeypatch):
    calls: list[str] = []
    function, inner = make_marked_function(calls)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with call_without_dynamo(function):
        assert getattr(inner, MARK) is inner
        with call_without_dynamo(function):  # one count inside another
            function()
        function()
        assert "torch._dynamo" not in sys.modules
    assert calls == ["inner", "inner"] and not hasattr(inner, MARK)


def test_where_dynamo_is_there_it_has_its_say(monkeypatch):
    function, inner = make_marked_function([])
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    with call_without_dynamo(function):
        assert not hasattr(inner, MARK)


def test_a_function_that_torch_marks_in_another_way_is_left_alone():
    with call_without_dynamo(print, None):
        pass
