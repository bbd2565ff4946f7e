"""Torch's compiler, dynamo, is not imported where nothing is compiled: half a second at the start of every process.

Functions that torch keeps out of compiled code import dynamo at their first call, to say so to it. Where it is not
there nothing is being compiled, and they can be called as they are. How torch marks them is private to it; where it
marks them in another way, dynamo is imported and nothing else changes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MARK = "__dynamo_disable"
"""Where torch keeps the form of such a function that it calls, once dynamo has made it."""


@contextmanager
def call_without_dynamo(*functions: Callable[..., Any] | None) -> Iterator[None]:
    """Inside, these functions of torch do not import dynamo; afterwards they are as they were.

    None stands for a function that this release of torch does not have.
    """
    inner_functions = [getattr(function, "__wrapped__", None) for function in functions]
    marked = [f for f in inner_functions if f is not None and not hasattr(f, MARK)]
    if "torch._dynamo" in sys.modules:
        marked = []
    for function in marked:
        setattr(function, MARK, function)
    try:
        yield
    finally:
        for function in marked:
            delattr(function, MARK)
