"""Division of a round's tasks into chunks, each of which is sent to one worker."""

from collections.abc import Sequence
from math import ceil, inf

MIN_CHUNK_SECONDS, MAX_CHUNK_SECONDS = 0.06, 0.2
"""Seconds that a chunk should take at least and at most; to send one costs about 5 ms."""


def split_into_chunks(steps: Sequence[float], width: int, workers: int) -> list[list[int]]:
    """Chunks of at most `width` task numbers, the longest tasks first: as many chunks for one worker as for another.

    `steps` is the estimated number of local steps of each task.
    """
    order = sorted(range(len(steps)), key=lambda i: -steps[i])
    chunks = max(1, workers * ceil(len(order) / (width * workers)))
    ends = [-(-len(order) * n // chunks) for n in range(chunks + 1)]
    return [order[a:b] for a, b in zip(ends, ends[1:]) if a < b]


def split_by_duration(steps: Sequence[float], seconds_per_step: float, workers: int, width: int) -> list[list[int]]:
    """Chunks of similar duration, the longest tasks first: two for each worker, more where they would be long.

    `seconds_per_step` is 0 where it is not known yet. A chunk begins at a multiple of `width`, the number of devices in
    one call, so that the devices of a call do not depend on how fast the machine is.
    """
    seconds_per_step = seconds_per_step or 4 * MAX_CHUNK_SECONDS * workers / max(1.0, sum(steps))
    seconds = [seconds_per_step * n for n in steps]
    total, width = sum(seconds), min(width, ceil(len(seconds) / workers))
    chunk_goal = min(max(total / (2 * workers), MIN_CHUNK_SECONDS), total / workers, MAX_CHUNK_SECONDS)
    chunks: list[list[int]] = []
    chunk_seconds = inf
    for i in sorted(range(len(seconds)), key=lambda i: -seconds[i]):
        if chunk_seconds >= chunk_goal - seconds[i] / 2 and (not chunks or len(chunks[-1]) % width == 0):
            chunks.append([])
            chunk_seconds = 0.0
        chunks[-1].append(i)
        chunk_seconds += seconds[i]
    return chunks
