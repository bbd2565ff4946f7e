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

import shoal
from shoal.compare.comparison import resume_comparison
from shoal.compare.parallel import stop_processes
from shoal.core.errors import ShoalError


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
