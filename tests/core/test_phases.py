"""The clock of phases: inner phases are not counted twice, and other threads and processes are not counted at all."""

import threading

import pytest

from shoal.core import phases
from shoal.core.phases import PhaseClock, RunningClock, in_phase, run_clock


@pytest.fixture
def ticks(monkeypatch):
    """A clock that is one second later whenever it is looked at."""
    times = iter(range(1000))
    monkeypatch.setattr(phases, "perf_counter", lambda: float(next(times)))


@in_phase("data")
def read_data(value: int) -> int:
    """Reads."""
    return value + 1


@in_phase("train")
def train(value: int) -> int:
    return read_data(value) + read_data(value)


@in_phase("pack")
def fail() -> None:
    raise ValueError("broken")


def test_what_a_phase_spends_inside_another_counts_for_the_inner_one(ticks):
    clock = PhaseClock()
    with run_clock(clock):
        assert train(1) == 4
    assert clock.seconds == {"data": 2.0, "train": 3.0, "pack": 0.0, "combine": 0.0, "evaluate": 0.0}


def test_a_phase_ends_where_it_raises(ticks):
    clock = PhaseClock()
    with run_clock(clock):
        with pytest.raises(ValueError):
            fail()
        read_data(1)
    assert clock.seconds["pack"] == clock.seconds["data"] == 1.0


def test_without_a_clock_nothing_is_timed_and_functions_keep_their_names(ticks):
    assert RunningClock.clock is None and train(1) == 4
    assert read_data.__name__ == "read_data" and read_data.__doc__ == "Reads."


def test_another_thread_is_not_timed(ticks):
    clock = PhaseClock()
    with run_clock(clock):
        thread = threading.Thread(target=train, args=(1,))
        thread.start()
        thread.join()
    assert not any(clock.seconds.values())


def test_a_clock_inside_another_leaves_it_running_again():
    outer, inner = PhaseClock(), PhaseClock()
    with run_clock(outer):
        with run_clock(inner):
            read_data(1)
        assert RunningClock.clock is outer and not outer.seconds["data"] and inner.seconds["data"]
    assert RunningClock.clock is None
