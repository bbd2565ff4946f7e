"""Whose answer something fails with: found by leaving answers out, so that one device costs nobody else the round."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.core.part import Part

A = TypeVar("A")
R = TypeVar("R")


class NotFinite(Exception):
    """What was made of some answers is not finite."""


def use_without_culprits(
    answers: Sequence[A], use: Callable[[list[A]], R], form: Callable[[A], Any], untrusted: bool
) -> tuple[R, dict[int, str]]:
    """What `use` makes of all answers that it does not raise with, and, by position, why the others were left out.

    Less than half of the answers may be left out; of answers that are `untrusted`, because they come from elsewhere, up
    to half, and all where there are fewer than three. Otherwise `use` itself is at fault, and what it raised at first
    is raised again. So it is when a compute device has no memory left.

    Answers of the most common form are tried first, so that an odd one cannot drive out those it does not go with.
    """
    try:
        return use(list(answers)), {}
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not answers:
            raise
        first = error
    forms = [repr(form(answer)) for answer in answers]
    common = Counter(forms)
    order = sorted(range(len(answers)), key=lambda i: -common[forms[i]])
    half = len(answers) // 2 if untrusted else (len(answers) - 1) // 2
    limit = len(answers) if untrusted and len(answers) < 3 else half
    for way in (order, order[::-1]):
        search = CulpritSearch(answers, use, limit)
        try:
            kept = search.add_usable([], way)
            return (search.made[0] if kept else use([])), search.why
        except TooManyCulprits:
            continue
    raise first


class TooManyCulprits(Exception):
    """More answers would have to be left out than can be the fault of those who gave them."""


class CulpritSearch:
    """Adds answers by halves, and leaves out the single ones that do not go with the rest."""

    def __init__(self, answers: Sequence, use: Callable, limit: int):
        self.answers, self.use, self.limit = answers, use, limit
        self.why: dict[int, str] = {}
        self.made: list = []
        """What was made of the answers that were kept last."""

    def add_usable(self, kept: list[int], more: list[int]) -> list[int]:
        """Those that are kept, with as many more as go with them."""
        try:
            self.made = [self.use([self.answers[i] for i in sorted([*kept, *more])])]
            return [*kept, *more]
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if len(more) == 1:
                self.why[more[0]] = explain_exclusion(error)
                if len(self.why) > self.limit:
                    raise TooManyCulprits from error
                return kept
        half = len(more) // 2
        return self.add_usable(self.add_usable(kept, more[:half]), more[half:])


def explain_exclusion(error: Exception) -> str:
    """Why an answer was left out, in one line of plain characters: part of it may come from a device."""
    if isinstance(error, NotFinite):
        return f"with its answer {error}"
    part, point = find_raising_part(error.__traceback__)
    text = error.problem if isinstance(error, ShoalError) else describe_error(error)
    plain = "".join(c for c in text[:200] if c.isprintable())
    return (
        f"its answer cannot be used by {part} at {point} ({plain})" if part else f"its answer cannot be used ({plain})"
    )


def find_raising_part(trace: TracebackType | None) -> tuple[str, str]:
    """The part that was at work when something was raised, and the point at which; empty where none was."""
    while trace is not None:
        caller = trace.tb_frame.f_locals.get("self")
        if isinstance(caller, Part):
            return caller.name(), trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return "", ""
