"""The profile of a run: seconds by phase, and a trace of one round for chrome://tracing or Perfetto."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.phases import PHASES, PhaseClock, run_clock
from shoal.storage.files import explain_disk_errors

if TYPE_CHECKING:
    from shoal.runs.history import History
    from shoal.runs.recipe import Recipe
    from shoal.runs.session import Watcher

TRACED_ROUND = 2
"""The round that is traced; the first one also sets things up. A run of one round is traced whole."""
PhaseSeconds = Mapping[str, float]
"""Seconds by phase, and of what belongs to none as `start` (before the first round) and `other`."""


@dataclass(frozen=True)
class RunProfile:
    """Where the time of a run went."""

    total: PhaseSeconds
    """The whole run, from reading the data to the trained model."""
    rounds: Sequence[PhaseSeconds]
    """Every round."""
    trace: Path
    """A file for chrome://tracing or Perfetto: the operations of one round, under the names of the phases."""
    traced_round: int
    """The round that the trace holds, counted from 1; it is slower for it."""

    @property
    def later_round(self) -> PhaseSeconds | None:
        """The mean of the rounds after the first, without the traced one if there are others; None without any."""
        later = list(enumerate(self.rounds, 1))[1:]
        chosen = [seconds for number, seconds in later if number != self.traced_round] or [s for _, s in later]
        return {phase: mean(seconds[phase] for seconds in chosen) for phase in chosen[0]} if chosen else None

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"{'phase':10}{'seconds':>10}{'share':>8}{'first round':>14}{'later round':>14}"]
        for cells in self.make_rows():
            lines.append("{:10}{:>10}{:>8}{:>14}{:>14}".format(*cells))
        return "\n".join(lines)

    def make_rows(self) -> list[tuple[str, str, str, str, str]]:
        """The table: phase, seconds of the whole run, their share, seconds of the first and of a later round."""
        columns = (self.total, self.rounds[0] if self.rounds else None, self.later_round)
        all_seconds = sum(self.total.values())

        def make_row(phase: str, *seconds: float | None) -> tuple[str, str, str, str, str]:
            whole, first, later = (f"{s:.3f}" if s is not None else "" for s in seconds)
            return phase, whole, f"{(seconds[0] or 0) / max(all_seconds, 1e-9):.0%}", first, later

        rows = [make_row(phase, *(c.get(phase) if c else None for c in columns)) for phase in self.total]
        return [*rows, make_row("all", *(sum(c.values()) if c else None for c in columns))]


class RunProfiler:
    """Times the phases of a run between `__enter__` and `__exit__`, and traces one of its rounds."""

    def __init__(self, trace: str | Path, rounds: int):
        self.trace, self.traced_round = Path(trace).expanduser(), min(TRACED_ROUND, rounds)
        if self.trace.is_dir():
            raise ShoalError("bad-value", f"profile is the folder {self.trace}.", "Name a file: trace.json.")
        self.clock, self.round_seconds = PhaseClock(), list[dict[str, float]]()
        self.open_contexts, self.tracer = ExitStack(), None
        self.start = self.round_start = perf_counter()
        self.counted = dict(self.clock.seconds)
        """Seconds by phase before the present round."""
        self.start_seconds = self.tracing_seconds = 0.0
        """What was spent before the first round outside of phases, and by starting and ending the trace."""
        self.total: dict[str, float] = {}

    def __enter__(self) -> "RunProfiler":
        self.open_contexts.enter_context(run_clock(self.clock))
        FORK_SENSITIVE.add(self)
        if self.traced_round == 1:
            self.start_trace()
        return self

    def __exit__(self, *error: object) -> None:
        FORK_SENSITIVE.discard(self)
        self.stop_trace()
        self.open_contexts.close()
        wall = perf_counter() - self.start - self.tracing_seconds
        self.total = add_other({**self.clock.seconds, "start": self.start_seconds}, wall)

    def follow_rounds(self, watch: "Watcher | None") -> "Watcher":
        """The watcher, which also tells this profiler when a round has ended."""

        def end_round(recipe: "Recipe", row: Row, history: "History") -> object:
            answer = watch(recipe, row, history) if watch else None
            now, seconds = perf_counter(), dict(self.clock.seconds)
            own = {phase: seconds[phase] - self.counted[phase] for phase in PHASES}
            self.round_seconds.append(add_other(own, now - self.round_start))
            if len(self.round_seconds) == self.traced_round:
                self.stop_trace()
            elif len(self.round_seconds) == self.traced_round - 1:
                self.start_trace()
            self.counted, self.round_start = seconds, perf_counter()
            return answer

        return end_round

    def begin_first_round(self) -> None:
        """What was timed so far was set-up, and belongs to no round."""
        self.counted, self.round_start = dict(self.clock.seconds), perf_counter()
        wall = self.round_start - self.start - self.tracing_seconds
        self.start_seconds = max(0.0, wall - sum(self.counted.values()))

    def start_trace(self) -> None:
        start, self.tracer = perf_counter(), torch.profiler.profile()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler prints when it starts and stops
        self.tracer.start()
        self.clock.is_traced = True
        self.tracing_seconds += perf_counter() - start

    def stop_trace(self) -> None:
        if self.tracer and self.clock.is_traced:
            start, self.clock.is_traced = perf_counter(), False
            self.tracer.stop()
            self.tracing_seconds += perf_counter() - start

    def write_profile(self) -> RunProfile:
        """Write the trace; the profile of the run."""
        temporary = self.trace.with_name(f".{self.trace.name}.{os.getpid()}")
        with explain_disk_errors(self.trace):
            self.trace.parent.mkdir(parents=True, exist_ok=True)
            if self.tracer:
                self.tracer.export_chrome_trace(str(temporary))
                temporary.replace(self.trace)
        return RunProfile(self.total, self.round_seconds, self.trace, self.traced_round)


def add_other(seconds: PhaseSeconds, wall: float) -> dict[str, float]:
    """The seconds of the phases, and as `other` what is left of the wall time."""
    return {**seconds, "other": max(0.0, wall - sum(seconds.values()))}


FORK_SENSITIVE: WeakSet[RunProfiler] = WeakSet()
"""Profilers at work. A trace ends before a worker process is forked, which would go on tracing for nobody."""


def stop_traces() -> None:
    for profiler in list(FORK_SENSITIVE):
        profiler.stop_trace()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=stop_traces)
