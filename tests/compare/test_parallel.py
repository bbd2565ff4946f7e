"""Runs of a comparison divided among processes: the same results, and every way in which a process can fail."""

import signal
import time
from collections.abc import Callable
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.compare.comparison import resume_comparison
from shoal.compare.parallel import stop_processes
from shoal.compare.run_groups import divide_among_processes
from shoal.core.errors import ShoalError
from shoal.runs.recipe import Recipe


def compared(methods: list[str], rounds: int = 3, **more: Any) -> shoal.Comparison:
    return shoal.compare(methods, rounds=rounds, devices=4, sample=2, engine="serial", **more)


def accuracies(result: shoal.Result) -> list[float]:
    return [row["accuracy"] for row in result.history.rows]


def test_the_results_do_not_depend_on_how_many_processes_there_are(capfd):
    seen: list[tuple[str, int, int]] = []
    one = compared(["fedavg", "scaffold"], seeds=2)
    two = compared(
        ["fedavg", "scaffold"],
        seeds=2,
        workers=2,
        watch=lambda r, row, h: seen.append((r.method, r.seed, len(h))),
    )
    for label, results in one.results.items():
        for a, b in zip(results, two.results[label], strict=True):
            assert a.recipe == b.recipe and accuracies(a) == accuracies(b)
            assert all(torch.equal(v, b.params[k]) for k, v in a.params.items())
    assert sorted(seen) == sorted((m, s, n) for m in ("fedavg", "scaffold") for s in (0, 1) for n in (1, 2, 3))
    assert "Traceback" not in capfd.readouterr().err


# who takes what -------------------------------------------------------------------------------------------------------
def list_shares(methods: list[str], seeds: int, workers: int) -> list[str]:
    """Each share as its method's first letter and its seeds."""
    recipes = [Recipe(method=method, seed=seed) for method in methods for seed in range(seeds)]
    shares = divide_among_processes(recipes, workers)
    return [f"{share[0].method[3]}{''.join(str(recipe.seed) for recipe in share)}" for share in shares]


def test_similar_runs_stay_together_and_the_last_ones_are_divided():
    methods = ["fedavg", "fedprox(mu=0.1)", "scaffold", "fedlc", "fednova"]
    assert list_shares(methods[:2], 3, 2) == ["a012", "p012"]
    assert list_shares(methods[:3], 3, 2) == ["a012", "p012", "f02", "f1"]
    assert list_shares(methods[:1], 3, 8) == ["a0", "a1", "a2"]
    assert list_shares(methods, 3, 3) == ["a012", "p012", "f012", "l02", "l1", "n02", "n1"]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9))
def test_every_run_is_in_one_share_and_no_process_is_idle_from_the_start(methods, seeds, workers):
    names = ["fedavg", "fedprox", "scaffold", "fedlc", "fednova"][:methods]
    recipes = [Recipe(method=name, seed=seed) for name in names for seed in range(seeds)]
    shares = divide_among_processes(recipes, workers)
    assert sorted((r.method, r.seed) for share in shares for r in share) == sorted((r.method, r.seed) for r in recipes)
    assert len(shares) >= min(workers, methods) and all(len({r.method for r in share}) == 1 for share in shares)
    assert [share[0].method for share in shares] == sorted((s[0].method for s in shares), key=names.index)


def test_a_process_takes_the_next_share_when_it_is_done():
    """Five methods in two processes: nobody knows beforehand who trains the third."""
    methods = ["fedavg", "fedprox(mu=0.1)", "scaffold", "fednova", "fedlc"]
    found = compared(methods, rounds=2, seeds=2, workers=2)
    assert {label: [len(r.history) for r in results] for label, results in found.results.items()} == {
        method: [2, 2] for method in methods
    }


@pytest.mark.whole
def test_folders_are_those_of_any_comparison(tmp_path):
    compared(["fedavg", "fedprox"], workers=2, out=str(tmp_path / "both"))
    again = compared(["fedavg", "fedprox"])
    found = sorted(p.parent.parent.name for p in Path(tmp_path).rglob("history.jsonl"))
    assert len(found) == 2 and again.results


@pytest.mark.whole
def test_a_comparison_that_was_stopped_goes_on_in_several_processes(tmp_path):
    whole = compared(["fedavg", "scaffold"], rounds=4)
    compared(["fedavg", "scaffold"], rounds=2, out=str(tmp_path / "c"))
    longer = resume_comparison(tmp_path / "c", changes={"rounds": 4}, workers=2)
    for label, (result,) in longer.results.items():
        assert accuracies(result) == accuracies(whole.results[label][0])


def test_what_is_wrong_in_a_process_is_told_in_one_sentence(tmp_path):
    model = tmp_path / "broken.py"
    model.write_text("raise RuntimeError('no such luck')\n")
    with pytest.raises(ShoalError, match="no such luck"):
        compared(["fedavg", "fedprox"], workers=2, model=f"{model}:make")


def test_a_process_that_dies_does_not_take_the_others_work_with_it(tmp_path):
    def killing(recipe, row, history):
        if recipe.method == "fedprox" and len(history) == 2:
            first = active_children()[0]
            first.kill()
            first.join()

    out = tmp_path / "both"
    with pytest.raises(ShoalError, match="has died") as told:
        compared(["fedavg", "fedprox"], workers=2, out=str(out), watch=killing, rounds=400)
    assert told.value.kind.name == "interrupted" and "shoal resume" in told.value.advice


def chatter(end: Connection) -> None:
    """Say more than a pipe can hold, and something at last."""
    try:
        while True:
            end.send(bytes(10_000))
    except KeyboardInterrupt:
        end.send(bytes(1_000_000))


def sleeper(end: Connection) -> None:
    """Say nothing."""
    time.sleep(600)


def spawned(target: Callable[[Connection], None]) -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(far,), daemon=True)
    process.start()
    far.close()
    return near, process


def test_processes_that_nobody_listens_to_any_more_end_by_themselves():
    started = dict(spawned(chatter) for _ in range(2))
    assert all(end.poll(60) for end in started)
    stop_processes(started, list(started), list(started))
    assert [process.exitcode for process in started.values()] == [0, 0]


def test_processes_that_have_not_begun_end_at_once_and_in_silence(capfd):
    started = dict(spawned(sleeper) for _ in range(2))
    stop_processes(started, list(started), [])
    assert [process.exitcode for process in started.values()] == [-signal.SIGTERM] * 2
    assert capfd.readouterr().err == ""
