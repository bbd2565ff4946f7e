"""Watching a run: callbacks, stopping, patience, the best model, validation and test beside each other."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal import History, Recipe, ShoalError, Stop
from shoal.cli.progress import Progress
from shoal.core.interrupts import Terminated
from shoal.core.streams import RandomStreams
from shoal.data.dataset import read_digits
from shoal.runs.loggers import flatten_numbers, make_logging_watcher
from shoal.runs.patience import describe_end_of_patience
from shoal.runs.recipe_data import load_recipe_dataset
from shoal.runs.store import RunFolder

TINY: dict[str, Any] = {"devices": 6, "sample": 3, "rounds": 5, "steps": "2", "batch": 8, "engine": "serial"}
HELD: dict[str, Any] = TINY | {"validation": 0.2}


def stop_after(rounds: int, why: str = "enough"):
    return lambda round: Stop(why) if round.number == rounds else None


# callbacks ------------------------------------------------------------------------------------------------------------
def test_callbacks_see_rows_and_the_model_that_is_judged(tmp_path):
    seen: list[tuple[int, float]] = []
    modules = []

    def look(round: shoal.WatchedRound) -> None:
        assert round.history.rows[-1] is round.row and round.recipe.method == "ema"
        seen.append((round.number, round.row["accuracy"]))
        modules.append(round.module())
        assert set(round.params) == set(dict(modules[-1].named_parameters()))

    result = shoal.run("ema", callbacks=[look, lambda round: seen.append((0, 0.0))], **TINY)
    assert [number for number, _ in seen] == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert [accuracy for number, accuracy in seen if number] == result.history["accuracy"]
    for own, last in zip(modules[-1].parameters(), result.module().parameters()):
        assert torch.equal(own, last)
    assert any(not torch.equal(a, b) for a, b in zip(modules[0].parameters(), modules[-1].parameters()))


def test_watching_changes_nothing():
    plain = shoal.run("scaffold", **TINY)
    watched = shoal.run("scaffold", callbacks=lambda round: round.module() and None, **TINY)
    assert watched.history.equals_except_wall_time(plain.history)


def test_a_callback_stops_a_run_and_the_folder_says_why(tmp_path):
    whole = shoal.run("scaffold", **TINY)
    result = shoal.run("scaffold", callbacks=stop_after(3), out=tmp_path / "r", **TINY)
    assert len(result.history) == 3 and result.history.stop_reason == "enough"
    assert json.loads((tmp_path / "r/history.jsonl").read_text().splitlines()[-1])["stopped"] == "enough"
    again = shoal.resume(tmp_path / "r", watch=lambda *row: pytest.fail("a stopped run was played"))
    assert len(again.history) == 3 and again.history.stop_reason == "enough"
    further = shoal.resume(tmp_path / "r", rounds=5, checkpoint_every=1)
    assert not further.history.stop_reason and further.history.equals_except_wall_time(whole.history)


def test_a_stop_ends_one_run_of_a_comparison(tmp_path):
    def stop(round: shoal.WatchedRound) -> Stop | None:
        return Stop("seed 1 is dull") if round.recipe.seed == 1 and round.number == 2 else None

    compared = shoal.compare(["fedavg"], seeds=2, callbacks=[stop], out=tmp_path / "c", **TINY)
    assert [len(r.history) for r in compared.results["fedavg"]] == [5, 2]
    read = shoal.resume(tmp_path / "c", watch=lambda *row: pytest.fail("a stopped run was played"))
    assert [len(r.history) for r in read.results["fedavg"]] == [5, 2]
    for workers in (0, 2):
        with pytest.raises(ShoalError, match="other processes"):
            shoal.compare(["fedavg"], callbacks=[stop], workers=workers, **TINY)


@pytest.mark.parametrize("kind", ["callbacks", "watch"])
def test_what_a_callback_raises_is_said_and_loses_nothing(kind, caplog):
    calls = []

    def broken(*round: Any) -> None:
        calls.append(1)
        raise ZeroDivisionError("by nothing")

    plain = shoal.run(**TINY)
    with caplog.at_level(logging.WARNING, "shoal"):
        result = shoal.run(**{kind: broken}, **TINY)
    assert result.history.equals_except_wall_time(plain.history) and len(calls) == 1
    (record,) = caplog.records
    said = record.getMessage()
    assert "broken raised ZeroDivisionError: by nothing in" in said and Path(__file__).name in said and "line" in said


def test_ctrl_c_in_a_callback_stops_as_ever(tmp_path):
    def interrupt(round: shoal.WatchedRound) -> None:
        raise KeyboardInterrupt if round.number == 2 else Terminated

    with pytest.raises(ShoalError) as stopped:
        shoal.run(callbacks=[lambda round: round.number == 2 and interrupt(round)], out=tmp_path / "r", **TINY)
    assert stopped.value.kind.name == "interrupted"
    assert len(shoal.resume(tmp_path / "r").history) == 5


def test_what_is_no_callback_is_refused():
    for wrong in ([3], "print"):
        with pytest.raises(ShoalError, match="cannot be called"):
            shoal.run(callbacks=wrong, **TINY)  # type: ignore
    with pytest.raises(ShoalError, match="no words"):
        Stop("")


# validation and test --------------------------------------------------------------------------------------------------
def test_both_halves_have_columns_and_the_old_ones_stay():
    both = shoal.run(metrics=("top3", "devices", "per_class"), **HELD)
    alone = shoal.run(metrics=("top3", "devices", "per_class"), evaluate_test=False, **HELD)
    extra = {key for key in both.history.to_dict() if key.startswith("test_")}
    assert extra == {"test_accuracy", "test_loss", "test_top3"}
    stripped = History([{k: v for k, v in row.items() if k not in extra} for row in both.history.rows])
    assert stripped.equals_except_wall_time(alone.history)
    assert both.history.metrics["test_accuracy"].title == "test accuracy"
    assert both.history.metrics["accuracy"].title == "validation accuracy"
    assert not any(key.startswith("test_") for key in shoal.run(**TINY).history.to_dict())


def test_the_test_columns_are_those_of_the_test_half():
    result, digits = shoal.run(normalise=True, **HELD), read_digits()
    mean, deviation = load_recipe_dataset(result.recipe, RandomStreams(0)).find_moments()  # of the samples that train
    logits = result.module()((digits.test_inputs - mean) / deviation)
    accuracy = (logits.argmax(-1) == digits.test_targets).double().mean().item()
    assert result.history.last("test_accuracy") == pytest.approx(accuracy)


def test_other_tasks_have_both_halves_and_their_own_headline(tmp_path):
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    data = (x[:160], x[:160].sum(1), x[160:], x[160:].sum(1))
    held: dict[str, Any] = HELD | {"lr": 0.3, "rounds": 12, "patience": 2, "keep_best": True}
    result = shoal.run(data=data, task="regress", split="iid", out=tmp_path / "r", **held)
    assert result.history.better == "down" and "test_mae" in result.history.rows[-1]
    best = result.history.find_best_round()
    assert best is not None and result.history.best == min(result.history[result.history.headline])
    assert result.best is not None and result.best.rounds == best + 1
    guessed = result.best.module()(x[160:]).flatten()
    assert result.history["test_mae"][best] == pytest.approx((guessed - x[160:].sum(1)).abs().mean().item(), rel=1e-4)


# patience -------------------------------------------------------------------------------------------------------------
def make_history(values: list[float | None], headline: str = "accuracy") -> History:
    costs = {"bytes_down": 0, "bytes_up": 0, "macs_work": 0, "sim_seconds": 0, "wall_seconds": 0}
    rows = [{"round": n, headline: v, **costs} for n, v in enumerate(values)]
    return History(rows, headline=headline)


@pytest.mark.parametrize(
    "values, headline, patience, over",
    [
        ([0.1, 0.2, 0.3], "accuracy", 1, False),
        ([0.3, 0.2, 0.1], "accuracy", 2, True),
        ([0.3, 0.3, 0.3], "accuracy", 2, True),  # equals are no improvement
        ([0.3, 0.2, 0.4], "accuracy", 1, False),
        ([0.3, 0.2, 0.1], "loss", 1, False),
        ([0.1, 0.2, 0.3], "loss", 2, True),
        ([None, None, None], "loss", 3, True),  # diverged from the start
        ([0.3, 0.2, 0.1], "accuracy", 0, False),
    ],
)
def test_patience_goes_by_the_direction_of_the_headline(values, headline, patience, over):
    recipe = Recipe(validation=0.1, patience=patience, headline=headline)
    assert bool(describe_end_of_patience(recipe, make_history(values, headline))) == over


def test_patience_ends_a_run_and_a_resumed_one_in_the_same_round(tmp_path):
    steep: dict[str, Any] = HELD | {"rounds": 12, "lr": 3.0, "patience": 2}
    whole = shoal.run(**steep)
    assert 2 < len(whole.history) < 12 and "no better accuracy" in whole.history.stop_reason
    best = whole.history.find_best_round()
    assert best is not None and len(whole.history) == best + 1 + 2
    short: dict[str, Any] = steep | {"rounds": 2}
    first = shoal.run(out=tmp_path / "r", **short)
    assert not first.history.stop_reason
    resumed = shoal.resume(tmp_path / "r", rounds=12)
    assert resumed.history.equals_except_wall_time(whole.history)
    assert len(shoal.resume(tmp_path / "r", rounds=20).history) == len(whole.history)
    assert len(shoal.resume(tmp_path / "r", patience=0, rounds=12).history) == 12


@pytest.mark.parametrize("key", ["patience", "keep_best"])
def test_nothing_is_chosen_by_test_data(key):
    with pytest.raises(ShoalError, match="test samples may not choose"):
        shoal.run(**{key: 1 if key == "patience" else True}, **TINY)


# the best model -------------------------------------------------------------------------------------------------------
def test_the_best_model_is_kept_exported_and_survives_a_kill(tmp_path):
    jumpy: dict[str, Any] = HELD | {"rounds": 8, "lr": 1.5, "keep_best": True}
    whole = shoal.run("fedavg", **jumpy)
    best = whole.history.find_best_round()
    assert whole.best is not None and best is not None and whole.best.rounds == best + 1 < 8

    def interrupt(round: shoal.WatchedRound) -> None:
        if round.number == best + 2:
            raise KeyboardInterrupt

    with pytest.raises(ShoalError):
        shoal.run("fedavg", callbacks=interrupt, out=tmp_path / "r", **jumpy)
    result = shoal.resume(tmp_path / "r")
    files = [file.name for file in (tmp_path / "r").glob("best-*")]
    assert files == [f"best-{best + 1}.safetensors"] and result.best is not None
    for own, other in zip(result.best.module().parameters(), whole.best.module().parameters()):
        assert torch.equal(own, other)
    exported = shoal.export(tmp_path / "r", tmp_path / "m.pt2", best=True)
    assert exported.about["best"] and exported.about["rounds"] == best + 1
    assert exported.about["accuracy"] == whole.best.value
    program: Any = torch.export.load(tmp_path / "m.pt2").module()
    x = torch.rand(3, 1, 8, 8)
    assert torch.allclose(program(x), whole.best.module()(x))
    with pytest.raises(ShoalError, match="best model"):
        shoal.export(tmp_path / "r", tmp_path / "r" / files[0], best=True, force=True)
    (tmp_path / "r" / files[0]).unlink()
    with pytest.raises(ShoalError, match="holds no best model"):
        shoal.export(tmp_path / "r", tmp_path / "n.pt2", best=True)


def test_the_best_model_of_a_pruned_run_is_that_of_its_round(tmp_path):
    recipe: dict[str, Any] = HELD | {
        "rounds": 4,
        "keep_best": True,
        "model": "lenet",
        "headline": "loss",
        "server_data": "per-class:5",
    }
    recipe["data"] = make_images()
    result = shoal.run("hrank(at=1, rate=0.5)", out=tmp_path / "r", **recipe)
    assert result.best is not None
    sizes = {k: v.shape for k, v in result.best.params.items()}
    read = shoal.resume(tmp_path / "r")
    assert len(set(sizes.values()) & {v.shape for v in result.net.initial.values()}) == len(set(sizes.values()))
    assert read.best is not None and {k: v.shape for k, v in read.best.params.items()} == sizes


def make_images() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 4
    x = torch.randn(200, 3, 32, 32, generator=generator) + y[:, None, None, None]
    return x[:160], y[:160], x[160:], y[160:]


def test_a_run_without_a_best_model_says_so(tmp_path):
    shoal.run(out=tmp_path / "r", **TINY)
    with pytest.raises(ShoalError, match="kept no best model"):
        shoal.export(tmp_path / "r", tmp_path / "m.pt2", best=True)


# loggers and bars -----------------------------------------------------------------------------------------------------
def test_loggers_get_the_numbers_of_parts_and_the_end_of_a_stopped_run():
    logged: list[dict[str, float]] = []
    ended: list[str] = []

    def open_run(recipe: Recipe, name: str):
        return lambda step, values: logged.append(values), lambda: ended.append(name)

    watch = make_logging_watcher("test", open_run)
    result = shoal.run("normbound(bound=0.01)", watch=watch, callbacks=stop_after(2), **TINY)
    own = [column for column in result.history.to_dict() if column.startswith("normbound.")]
    assert own and all(column in values for values in logged for column in own)
    assert len(logged) == 2 and ended == ["normbound-bound-0.01-seed-0"]
    assert dict(flatten_numbers(result.history.rows[-1]))[own[0]] == result.history[own[0]][-1]


def test_a_logger_that_fails_loses_nothing(caplog):
    def open_run(recipe: Recipe, name: str):
        raise OSError("no server")

    with caplog.at_level(logging.WARNING, "shoal"):
        result = shoal.run(watch=make_logging_watcher("mlflow", open_run), **TINY)
    assert len(result.history) == 5
    assert [r.getMessage() for r in caplog.records] == [
        "The logger mlflow failed (OSError: no server). It is not called again, and the run goes on."
    ]


def test_a_comparison_has_a_bar_per_method_and_one_for_all():
    runs = {m: [Recipe(method=m, seed=s, rounds=4) for s in (0, 1)] for m in ("fedavg", "scaffold")}
    with Progress(silent=True, as_json=False, runs=4) as progress:
        progress.plan_comparison(runs, lambda recipe: 4 if recipe.method == "fedavg" and recipe.seed == 0 else 0)
        history = make_history([0.1, 0.2])
        progress.show_row(runs["fedavg"][1], history.rows[-1], history)
        progress.show_row(runs["scaffold"][0], history.rows[-1], make_history([0.4, 0.6]))
        tasks = {task.description: task for task in progress.bars.tasks}
        assert {name: (task.completed, task.total) for name, task in tasks.items()} == {
            "fedavg": (6, 8), "scaffold": (2, 8), "all 4 runs": (8, 16),
        }  # fmt: skip
        assert tasks["scaffold"].fields["status"] == "acc 0.600"


def test_a_row_with_a_wrong_reason_is_damage(tmp_path):
    shoal.run(out=tmp_path / "r", **TINY)
    file = tmp_path / "r/history.jsonl"
    file.write_text(file.read_text().replace('{"round":0,', '{"stopped":3,"round":0,'))
    with pytest.raises(ShoalError) as refused:
        RunFolder.open(tmp_path / "r", to_write=False).read_history()
    assert refused.value.kind.name == "damaged"
