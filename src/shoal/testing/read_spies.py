"""Spies that note what a part reads on the server about single devices: updates, extras, cards, sizes, outcomes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from inspect import signature
from typing import Any

from shoal.core.part import POINTS, Part
from shoal.core.types import Reply, Roster, Round

SERVER_POINTS = tuple(p for p in ("init_server", *POINTS) if "round" in signature(getattr(Part, p)).parameters)
"""Those that are given a round."""
REPLY_READS = {"delta": "updates", "report": "extras", "size": "sizes", "outcome": "outcomes"}


def spy_on_part(part: Part, seen: set[str]) -> Part:
    """A copy of a part that adds to `seen` what its points on the server read."""
    cls = type(part)

    def make_spying_point(point: str) -> Callable:
        def call_point(self, *args):
            returned = getattr(cls, point)(part, *(spy_on_argument(arg, seen) for arg in args))
            return (release_replies(returned[0]), returned[1]) if point == "sift" else returned

        return call_point

    body: dict[str, Any] = {point: make_spying_point(point) for point in SERVER_POINTS if part.acts_at(point)}
    body["name"] = classmethod(lambda _: cls.name())
    return type(cls.__name__, (cls,), body)(**{f.name: getattr(part, f.name) for f in fields(part)})


def spy_on_argument(argument: Any, seen: set[str]) -> Any:
    """The round, or the replies, with spies in their place; anything else as it is."""
    if isinstance(argument, Round):
        replies = spy_on_argument(argument.replies, seen)
        spied = replace(argument, replies=replies, roster=SpyRoster(argument.roster, seen))
        return copy_as(make_spy_round(seen), spied)
    if isinstance(argument, (list, tuple)) and argument and all(isinstance(reply, Reply) for reply in argument):
        kind = make_spy_reply(seen, {id(getattr(reply, name)) for reply in argument for name in ("delta", "report")})
        return [copy_as(kind, reply) for reply in argument]
    return argument


def release_replies(replies: Sequence[Reply]) -> list[Reply]:
    """Replies without spies, so that what the loop reads of them is not taken for reads of the part."""
    return [Reply(**{f.name: object.__getattribute__(reply, f.name) for f in fields(reply)}) for reply in replies]


def copy_as(kind: type, value: Any) -> Any:
    return kind(**{f.name: getattr(value, f.name) for f in fields(value) if f.init})


def is_copying() -> bool:
    """Whether an attribute is read by `dataclasses.replace`, which reads all of them and looks at none."""
    return sys._getframe(2).f_globals.get("__name__") == "dataclasses"


def make_spy_reply(seen: set[str], originals: set[int]) -> type[Reply]:
    """A class of replies that note reads; what a part has put in the place of an update or an extra is its own."""

    class SpyReply(Reply):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in REPLY_READS and not is_copying():
                if name not in ("delta", "report") or id(value) in originals:
                    seen.add(REPLY_READS[name])
            return value

    return SpyReply


def make_spy_round(seen: set[str]) -> type[Round]:
    """A class of rounds that note who reads numbers of samples; who holds any, and how many devices, is no secret."""
    harmless = {Round.eligible.fget.__code__, Round.population.fget.__code__}  # pyright: ignore

    class SpyRound(Round):
        def __getattribute__(self, name: str) -> Any:
            if name == "sizes" and not is_copying() and sys._getframe(1).f_code not in harmless:
                seen.add("sizes")
            return super().__getattribute__(name)

    return SpyRound


class SpyRoster:
    """A roster that notes who asks for enrolment cards."""

    def __init__(self, inner: Roster, seen: set[str]):
        self.inner, self.seen = inner, seen

    def __getitem__(self, device: int):
        self.seen.add("cards")
        return self.inner[device]

    def fetch_cards(self, devices):
        self.seen.add("cards")
        return self.inner.fetch_cards(devices)
