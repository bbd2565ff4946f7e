"""Which tasks of a round are sent to a worker together."""

from collections.abc import Sequence
from math import ceil, inf

MIN_CHUNK_SECONDS, MAX_CHUNK_SECONDS = 0.06, 0.2
"""Seconds that a chunk takes at least and at most, where its devices are short enough; to send one costs about 5 ms."""


def split_into_chunks(work: Sequence[float], width: int, workers: int) -> list[list[int]]:
    """Which tasks are trained together: the longest first, so many at a time; fewer where a worker would get none."""
    order = sorted(range(len(work)), key=lambda i: -work[i])
    if len(order) >= width * workers:
        ends = [*range(0, len(order), width), len(order)]
    else:
        ends = [-(-len(order) * n // workers) for n in range(workers + 1)]
    return [order[a:b] for a, b in zip(ends, ends[1:]) if a < b]


def split_by_duration(work: Sequence[float], pace: float, hands: int, lanes: int) -> list[list[int]]:
    """The same where a unit of work takes `pace` seconds, 0 if nobody knows: two chunks for everybody, more where they
    would be long.

    A chunk begins at a multiple of `lanes`, so that who is trained in one call does not depend on the pace.
    """
    pace = pace or 4 * MAX_CHUNK_SECONDS * hands / max(1.0, sum(work))
    seconds = [pace * own for own in work]
    total, lanes = sum(seconds), min(lanes, ceil(len(seconds) / hands))
    goal = min(max(total / (2 * hands), MIN_CHUNK_SECONDS), total / hands, MAX_CHUNK_SECONDS)
    chunks: list[list[int]] = []
    took = inf
    for i in sorted(range(len(seconds)), key=lambda i: -seconds[i]):
        if took >= goal - seconds[i] / 2 and (not chunks or len(chunks[-1]) % lanes == 0):
            chunks.append([])
            took = 0.0
        chunks[-1].append(i)
        took += seconds[i]
    return chunks
