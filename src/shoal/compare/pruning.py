"""Giving up hopeless tries of a tuning: after a part of the rounds those that lag behind are stopped.

All tries of a batch are played to the same round before any is compared, so that neither the order in which they run
nor the number of processes decides, and a tuning that was stopped gives up the same ones as one that never was.
"""

from collections.abc import Callable, Sequence
from math import ceil
from statistics import median

from shoal.core.errors import unknown_name_error
from shoal.runs.headline import is_at_least

Scores = Sequence[float | None]
Pruner = Callable[[Scores, Scores, str], list[bool]]
"""Given the scores of a batch at a round, those of earlier tries there, and "up" or "down": who goes on."""
SHARES = {"none": (), "median": (0.25, 0.5, 0.75), "halving": (0.25, 0.5)}
"""After which shares of the rounds tries are given up, by pruner."""


def keep_better_half(scores: Scores, earlier: Scores, better: str) -> list[bool]:
    """Successive halving: the better half of the batch goes on, rounded up; the first of equals."""
    sign = 1 if better == "down" else -1
    ranked = sorted(range(len(scores)), key=lambda n: (scores[n] is None, sign * (scores[n] or 0.0), n))
    kept = set(ranked[: ceil(len(scores) / 2)])
    return [n in kept for n in range(len(scores))]


def keep_above_median(scores: Scores, earlier: Scores, better: str) -> list[bool]:
    """Those go on that are at least as good as the median of all tries that came so far; what diverged does not."""
    there = [score for score in (*scores, *earlier) if score is not None]
    bar = median(there) if there else 0.0
    return [score is not None and is_at_least(score, bar, better) for score in scores]


PRUNERS: dict[str, Pruner] = {"median": keep_above_median, "halving": keep_better_half}


def list_rungs(pruner: str, rounds: int) -> list[int]:
    """The rounds after which tries are compared, and the last one."""
    if pruner not in SHARES:
        raise unknown_name_error("pruner", pruner, SHARES)
    return sorted({max(1, round(share * rounds)) for share in SHARES[pruner]} | {rounds})
