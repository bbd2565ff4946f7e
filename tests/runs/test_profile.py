"""Profiles of runs: a trace that viewers read, a table that adds up, and a run that is the same for it."""

import json
from typing import Any

import pytest

import shoal
from shoal import ShoalError
from shoal.core.model import tree
from shoal.core.phases import PHASES, RunningClock
from shoal.testing.rounds import drop_wall_seconds

SMALL: dict[str, Any] = dict(data="digits", model="mlp", devices=6, sample=3, rounds=3, steps="2", batch=8)


def read_phases(trace) -> list[str]:
    """The names of the phases in a trace, in the order of their beginnings."""
    events = json.loads(trace.read_text())["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in ranges)
    return [e["name"] for e in sorted(ranges, key=lambda e: e["ts"])]


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
def test_a_profiled_run_is_the_same_run(engine, tmp_path):
    values = dict(SMALL, engine=engine, method="scaffold")
    plain = shoal.run(**values)
    profiled = shoal.run(**values, profile=tmp_path / "trace.json")
    assert profiled.recipe == plain.recipe and tree.is_same_tree(profiled.params, plain.params)
    assert [drop_wall_seconds(r) for r in profiled.history.rows] == [drop_wall_seconds(r) for r in plain.history.rows]
    assert plain.profile is None and RunningClock.clock is None
    names = read_phases(tmp_path / "trace.json")
    assert set(names) == set(PHASES) and names.count("train") == names.count("combine") == 1, "one round is traced"
    assert names.index("train") < names.index("combine") < names.index("evaluate")


def test_the_table_adds_up(tmp_path):
    profile = shoal.run(**SMALL, engine="serial", profile=str(tmp_path / "trace.json")).profile
    assert profile is not None and profile.traced_round == 2 and len(profile.rounds) == 3
    assert profile.later_round == profile.rounds[2], "the traced round is left out where there is another"
    assert list(profile.total) == [*PHASES, "start", "other"] and min(profile.total.values()) >= 0
    for phase in PHASES:
        assert sum(seconds[phase] for seconds in profile.rounds) <= profile.total[phase] + 1e-9
    lines = str(profile).splitlines()
    assert [line.split()[0] for line in lines] == ["phase", *PHASES, "start", "other", "all"]
    assert lines[-1].split()[2] == "100%"


def test_a_run_of_one_round_is_traced_whole(tmp_path):
    profile = shoal.run(**dict(SMALL, rounds=1), engine="serial", profile=tmp_path / "new" / "trace.json").profile
    assert profile is not None and profile.traced_round == 1 and profile.later_round is None
    assert {"train", "evaluate"} <= set(read_phases(tmp_path / "new" / "trace.json"))
    assert str(profile)


def test_a_trace_ends_where_worker_processes_begin(tmp_path):
    profile = shoal.run(**dict(SMALL, rounds=1), engine="pool", profile=tmp_path / "trace.json").profile
    assert profile is not None and profile.total["train"] > 0
    assert "combine" not in read_phases(tmp_path / "trace.json")


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(shoal.ShoalError, match="profile is the folder"):
        shoal.run(**SMALL, profile=tmp_path)


def test_a_run_that_fails_leaves_no_clock_running(tmp_path):
    def stop(*_) -> None:
        raise KeyboardInterrupt

    with pytest.raises(ShoalError, match="Stopped"):
        shoal.run(**SMALL, engine="serial", watch=stop, profile=tmp_path / "trace.json")
    assert RunningClock.clock is None and not list(tmp_path.iterdir())
