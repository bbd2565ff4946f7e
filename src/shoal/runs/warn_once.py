"""What is probably a mistake is said once in a run or a comparison, however many seeds and processes it has."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

log = logging.getLogger("shoal")
_said: ContextVar[set[str] | None] = ContextVar("said", default=None)


@contextmanager
def suppress_repeated_warnings() -> Iterator[None]:
    """Inside, a warning of one wording is given once; inside another such block nothing changes."""
    token = _said.set(set()) if _said.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _said.reset(token)


def warn_once(wording: str, *values: Any) -> None:
    """One line for the user: on the command line above the bar, in Python by the logger `shoal`."""
    said = _said.get()
    if said is not None:
        if wording in said:
            return
        said.add(wording)
    log.warning(wording, *values)
