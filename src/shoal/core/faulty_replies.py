"""Finds the replies that make an aggregation fail, by leaving replies out, so that one device cannot void a round."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.core.part import Part
from shoal.core.server_state import MissingEnrolment

ReplyType = TypeVar("ReplyType")
ResultType = TypeVar("ResultType")


class NotFinite(Exception):
    """What the server computed from some replies is not finite."""


def use_without_culprits(
    replies: Sequence[ReplyType],
    use: Callable[[list[ReplyType]], ResultType],
    outline: Callable[[ReplyType], Any],
    untrusted: bool,
) -> tuple[ResultType, dict[int, str]]:
    """What `use` returns for all replies that it does not raise with, and, by position, why the others were left out.

    Less than half of the replies may be left out; of `untrusted` ones up to half, and all where there are fewer than
    three. Otherwise `use` itself is at fault, and what it raised at first is raised again. So is an error for lack of
    GPU memory, or of an enrolment card, which names its device itself.

    Replies with the most common outline (structure and shapes) are tried first, so that one with another
    outline cannot drive out the rest.
    """
    try:
        return use(list(replies)), {}
    except Exception as error:
        if isinstance(error, (torch.OutOfMemoryError, MissingEnrolment)) or not replies:
            raise
        first_error = error
    outlines = [repr(outline(reply)) for reply in replies]
    frequency = Counter(outlines)
    order = sorted(range(len(replies)), key=lambda i: -frequency[outlines[i]])
    half = len(replies) // 2 if untrusted else (len(replies) - 1) // 2
    limit = len(replies) if untrusted and len(replies) < 3 else half
    for trial in (order, order[::-1]):
        search = CulpritSearch(replies, use, limit)
        try:
            usable = search.add_usable([], trial)
            return (search.result[0] if usable else use([])), search.reasons
        except TooManyCulprits:
            continue
    raise first_error


class TooManyCulprits(Exception):
    """More replies would have to be left out than `limit`."""


class CulpritSearch:
    """Adds replies by halves (bisection) and leaves out single ones with which `use` raises."""

    def __init__(self, replies: Sequence, use: Callable, limit: int):
        self.replies, self.use, self.limit = replies, use, limit
        self.reasons: dict[int, str] = {}
        self.result: list = []
        """What `use` returned for the usable replies so far, as a list of one."""

    def add_usable(self, usable: list[int], candidates: list[int]) -> list[int]:
        """The positions of usable replies, with as many of `candidates` as `use` does not raise with."""
        try:
            self.result = [self.use([self.replies[i] for i in sorted([*usable, *candidates])])]
            return [*usable, *candidates]
        except Exception as error:
            if isinstance(error, (torch.OutOfMemoryError, MissingEnrolment)):
                raise
            if len(candidates) == 1:
                self.reasons[candidates[0]] = explain_exclusion(error)
                if len(self.reasons) > self.limit:
                    raise TooManyCulprits from error
                return usable
        half = len(candidates) // 2
        return self.add_usable(self.add_usable(usable, candidates[:half]), candidates[half:])


def explain_exclusion(error: Exception) -> str:
    """Why a reply was left out, in one line of printable characters, since a device may have written part of it."""
    if isinstance(error, NotFinite):
        return f"with its answer {error}"
    part, point = find_raising_part(error.__traceback__)
    text = error.problem if isinstance(error, ShoalError) else describe_error(error)
    printable = "".join(c for c in text[:200] if c.isprintable())
    return (
        f"its answer cannot be used by {part} at {point} ({printable})"
        if part
        else f"its answer cannot be used ({printable})"
    )


def find_raising_part(trace: TracebackType | None) -> tuple[str, str]:
    """The name of the part that was running when something was raised, and the point; empty texts where none was."""
    while trace is not None:
        caller = trace.tb_frame.f_locals.get("self")
        if isinstance(caller, Part):
            return caller.name(), trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return "", ""
