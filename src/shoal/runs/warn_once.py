"""Warnings that are given once per run or comparison, however many seeds and processes it has."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

log = logging.getLogger("shoal")
_given_warnings: ContextVar[set[str] | None] = ContextVar("said", default=None)


@contextmanager
def suppress_repeated_warnings() -> Iterator[None]:
    """Inside, `warn_once` gives each wording once; a nested block changes nothing."""
    token = _given_warnings.set(set()) if _given_warnings.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _given_warnings.reset(token)


def warn_once(wording: str, *values: Any) -> None:
    """Log a warning, unless one of the same wording was given inside the current block."""
    given_warnings = _given_warnings.get()
    if given_warnings is not None:
        if wording in given_warnings:
            return
        given_warnings.add(wording)
    log.warning(wording, *values)
