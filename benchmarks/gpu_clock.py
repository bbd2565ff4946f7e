"""Timing calls on a GPU or a processor, and limits of time for what is timed."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch

REPEATS = 10
"""Calls of one CUDA graph."""


class OutOfTime(BaseException):
    """The time for something is up. No `Exception`, because engines go on after those in another way."""


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside after so many seconds."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure_microseconds(call: Callable[[], Any], place: torch.device) -> float:
    """Of one call: on a GPU as part of a CUDA graph of several, else by the clock."""
    with torch.no_grad():
        if place.type == "cpu":
            return 1e6 * min(time_call(call) for _ in range(3))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                call()
        return measure_replay(graph, 5) * 1e6 / REPEATS


def measure_replay(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Seconds of one replay, the median."""
    graph.replay()
    return median(time_call(lambda: (graph.replay(), torch.cuda.synchronize())) for _ in range(replays))


def time_call(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def print_row(*cells: Any) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
