"""The number of threads is a run's own: whatever the program around it has, the same seed gives the same bits."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.compare.comparison import resume_comparison
from shoal.engines.threads import use_threads
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice, choose_engine, parse_engine_choice
from shoal.runs.recipe import Recipe
from shoal.runs.start import load_result

SETTING: dict[str, Any] = {"devices": 4, "sample": 2, "split": "iid", "rounds": 1, "steps": "3", "batch": 32}
"""With batches of this size a model like LeNet gives other bits with two threads than with one."""


@contextmanager
def surrounding_threads(threads: int) -> Iterator[None]:
    """A program that computes with so many threads before shoal is called, and afterwards."""
    torch.set_num_threads(threads)
    try:
        yield
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


def run_with_threads(threads_around: int, **more: Any) -> shoal.Result:
    with surrounding_threads(threads_around):
        return shoal.run(**SETTING | more)


def same_bits(one: shoal.Result, other: shoal.Result) -> bool:
    params = all(torch.equal(value, other.params[name]) for name, value in one.params.items())
    return params and one.history.equals_except_wall_time(other.history)


def read_engine_note(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "engine.json").read_text())


@pytest.mark.parametrize("engine", ["serial", "batched", "pool", "auto"])
@pytest.mark.parametrize("more", [{"model": "lenet"}, {"model": "mlp", "normalise": True}], ids=["lenet", "mlp"])
def test_the_same_seed_gives_the_same_bits_with_any_number_of_threads_around(engine, more):
    assert same_bits(run_with_threads(1, engine=engine, **more), run_with_threads(2, engine=engine, **more))


def test_what_the_server_trains_has_the_same_bits_too():
    more = {"method": "feddf", "model": "lenet", "server_data": "share:0.1", "engine": "serial"}
    assert same_bits(run_with_threads(1, **more), run_with_threads(2, **more))


def test_asked_for_threads_are_used_and_are_in_the_bits():
    one, two = (run_with_threads(1, model="lenet", engine="serial", threads=n) for n in (1, 2))
    assert one.engine == EngineChoice("serial") and two.engine == EngineChoice("serial", threads=2)
    assert not same_bits(one, two), "a setting in which the number of threads changes nothing tests nothing"
    assert same_bits(two, run_with_threads(2, model="lenet", engine="serial", threads=2))


@pytest.mark.parametrize("threads", [0, 2])
def test_a_resumed_run_goes_on_with_its_own_number(tmp_path, threads):
    setting: dict[str, Any] = {"model": "lenet", "engine": "serial", "threads": threads}
    straight = run_with_threads(1, **setting | {"rounds": 2})
    run_with_threads(1, out=str(tmp_path / "run"), **setting)
    assert read_engine_note(tmp_path / "run")["threads"] == (threads or 1)
    with surrounding_threads(2 if threads != 2 else 1):
        resumed = shoal.resume(tmp_path / "run", rounds=2)
        again = load_result(tmp_path / "run")
    assert same_bits(straight, resumed) and same_bits(straight, again)


def test_a_run_that_remembers_no_threads_goes_on_with_those_around_and_says_so(tmp_path, caplog):
    """As a folder of an earlier version does, whose run computed with what the program had."""
    out = tmp_path / "run"
    straight = run_with_threads(1, model="lenet", engine="serial", threads=2, rounds=2)
    run_with_threads(1, model="lenet", engine="serial", threads=2, out=str(out))
    pick = read_engine_note(out)
    (out / "engine.json").write_text(json.dumps({k: v for k, v in pick.items() if k != "threads"}))
    with surrounding_threads(2), caplog.at_level(logging.WARNING, logger="shoal"):
        resumed = shoal.resume(out, rounds=2)
    assert same_bits(straight, resumed)
    assert "does not say with how many threads it was begun; it goes on with 2" in caplog.text
    assert read_engine_note(out)["threads"] == 2
    caplog.clear()
    shoal.resume(out, rounds=3)
    assert "threads" not in caplog.text


def test_runs_of_a_comparison_that_remember_other_threads_keep_them(tmp_path):
    setting: dict[str, Any] = SETTING | {"engine": "batched", "out": str(tmp_path / "all")}
    shoal.compare(["fedavg"], seeds=2, **setting)
    first = tmp_path / "all" / "0-fedavg" / "seed-0"
    (first / "engine.json").write_text(json.dumps(read_engine_note(first) | {"threads": 2}))
    seen: dict[int, int] = {}
    resume_comparison(
        tmp_path / "all", lambda recipe, *_: seen.update({recipe.seed: torch.get_num_threads()}), {"rounds": 2}
    )
    assert seen == {0: 2, 1: 1}


def test_processes_with_a_core_each_have_no_further_threads():
    for engine in ("pool", "ray"):
        with pytest.raises(shoal.ShoalError, match=f"threads is 2, and engine is {engine}, .* Add --engine"):
            choose_engine(assemble_run(Recipe().with_values(engine=engine, threads=2)))
    assert choose_engine(assemble_run(Recipe().with_values(engine="pool", threads=1))).threads == 1


def test_threads_are_as_before_after_an_error():
    with surrounding_threads(2), pytest.raises(ZeroDivisionError), use_threads(1):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    with surrounding_threads(2), use_threads(0):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("found", [-1, "2", True, 10**9, None])
def test_a_stored_number_that_makes_no_sense_is_not_used(found):
    assert parse_engine_choice({"engine": "serial", "threads": found}) is None


def test_threads_are_told():
    assert str(EngineChoice("serial", threads=4)) == "serial, 4 threads"
    assert str(EngineChoice("serial")) == "serial"
