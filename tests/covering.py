"""Few of many that show what all would: of pairs of parts, and of whatever else has traits."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import permutations, product
from typing import Any

from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.part import POINTS, Part
from shoal.plugins.smoke_run import build_tiny_run, prepare_local_trainings
from shoal.testing.rounds import play_rounds

Pair = tuple[Part, Part]


@cache
def list_traits(part: Part) -> frozenset[str]:
    """All that composing a part can depend on: where it acts, what it claims, where it keeps what."""
    claims = {f"sets {what}" for what in part.sets} | {f"carries {part.carries}"}
    claims |= {name for name in ("replaces_loss", "makes_features") if getattr(part, name)}
    claims |= {f"codes {part.stage} {way}" for way in part.directions if part.stage}
    return frozenset(claims | {p for p in (*POINTS, "taps") if part.acts_at(p)} | list_states(part))


def list_states(part: Part) -> set[str]:
    """The places in which something of a part is found after a round."""
    loop, net = build_tiny_run(Method((part,)))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    own = part.name()
    found = {
        "state of the server": standing.states.get(own),
        "memory of a device": [loop.host.memory.get(d).get(own) for d in range(len(loop.sizes))],
        "state in a local run": [visit.state.states.get(own) for visit in prepare_local_trainings(loop, standing, 1)],
        "cards": [card for card in standing.cards.values() if part.acts_at("enrol")],
    }
    return {place for place, held in found.items() if any(held or ())}


def list_pairs(parts: Sequence[Part]) -> list[Pair]:
    """Every ordered pair of different parts."""
    return [(a, b) for a, b in permutations(parts, 2) if a.name() != b.name()]


@cache
def is_refused(first: Part, second: Part) -> bool:
    try:
        compose([first, second])
    except ShoalError:
        return True
    return False


@cache
def cover_pairs(parts: tuple[Part, ...]) -> list[Pair]:
    """All pairs that are refused, and of the others so few that every part is first and second, and that all traits
    that meet in any of them, in this order, meet in one of these."""
    pairs = list_pairs(parts)
    refused = [pair for pair in pairs if is_refused(*pair)]
    return refused + choose_few((pair, list_meetings(*pair), 1) for pair in pairs if not is_refused(*pair))


def choose_few(offers: Iterable[tuple[Any, Iterable, float]]) -> list:
    """Of things with traits and a cost few that have all traits: always the one with the most new traits for its cost.

    The traits are bits of one number, since there are thousands of things."""
    bits: dict[Any, int] = {}
    left = [(sum(1 << bits.setdefault(t, len(bits)) for t in set(own)), cost, thing) for thing, own, cost in offers]
    chosen = []
    while left:
        most, _, best = max(left, key=lambda offer: offer[0].bit_count() / offer[1])
        chosen.append(best)
        left = [(rest, cost, thing) for own, cost, thing in left if (rest := own & ~most)]
    return chosen


def list_meetings(first: Part, second: Part) -> set[tuple[str, str]]:
    """What is tried where two parts are listed one after the other: each trait of the one with each of the other."""
    places = {(first.name(), "first"), (second.name(), "second")}
    return places | set(product(list_traits(first), list_traits(second)))
