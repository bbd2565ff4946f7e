"""Where the seconds of a run go: functions that belong to a phase of a round are timed while a clock runs.

Without a clock a call costs a tenth of a microsecond more.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import perf_counter
from typing import ParamSpec, TypeVar

import torch

PHASES = ("data", "train", "pack", "combine", "evaluate")
"""What a round spends its time with; the rest of a run is `other`."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


class PhaseClock:
    """Adds up the seconds of each phase; what a phase spends inside another counts for the inner one alone.

    It times the process and the thread in which it was made. On a GPU it waits at the ends of phases for what they
    have started.
    """

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.is_traced = False
        """Whether phases are also named in the trace of torch's profiler."""
        self._open_phases: list[str] = []
        self._since = perf_counter()
        self._owner = find_thread()

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        if find_thread() != self._owner:
            yield
            return
        self._add_seconds()
        self._open_phases.append(phase)
        try:
            if self.is_traced:
                with torch.profiler.record_function(phase):
                    yield
            else:
                yield
        finally:
            self._add_seconds()
            self._open_phases.pop()

    def _add_seconds(self) -> None:
        """Count the time since the last change of phase for the innermost open one."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = perf_counter()
        if self._open_phases:
            self.seconds[self._open_phases[-1]] += now - self._since
        self._since = now


def find_thread() -> tuple[int, int]:
    """The process and the thread that runs this."""
    return os.getpid(), threading.get_ident()


class RunningClock:
    """The clock that runs at present; None where nothing is timed."""

    clock: PhaseClock | None = None


@contextmanager
def run_clock(clock: PhaseClock) -> Iterator[None]:
    """Inside, a clock times the functions of phases; afterwards the one from before does."""
    before, RunningClock.clock = RunningClock.clock, clock
    try:
        yield
    finally:
        RunningClock.clock = before


def in_phase(phase: str) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Let a function belong to a phase."""

    def mark_function(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        @wraps(function)
        def call_in_phase(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            if RunningClock.clock is None:
                return function(*args, **kwargs)
            with RunningClock.clock.time_phase(phase):
                return function(*args, **kwargs)

        return call_in_phase

    return mark_function
