"""Comparisons: the numbers in the table, equal conditions for all, and budgets that stop in time."""

from functools import cache
from statistics import mean, stdev
from typing import Any, cast

import pytest
import torch

import shoal
from shoal import History, Recipe, Result
from shoal.compare import Comparison, compare, go_on

TINY: dict[str, Any] = {"devices": 6, "sample": 3, "rounds": 4, "steps": "2", "batch": 8}
RECIPE = Recipe(**TINY)
LONG: dict[str, Any] = TINY | {"rounds": 8}
METHODS = ["fedavg", "fedprox(mu=0.1)", "scaffold"]


@cache
def three() -> Comparison:
    return compare(METHODS, RECIPE, 2)


def result(*accuracies: float | None, cost: int = 10) -> Result:
    """A result with a hand-made history."""
    costs = {"bytes_down": cost, "bytes_up": 1, "macs_work": 2 * cost, "sim_seconds": 0.5, "wall_seconds": 3.0}
    rows = [{"round": n, "accuracy": a, **costs} for n, a in enumerate(accuracies)]
    return Result(Recipe(), History(rows), cast(Any, None), {})


# the table ------------------------------------------------------------------------------------------------------------
def test_a_row_by_hand():
    comparison = Comparison({"m": [result(0.2, 0.8, 0.6), result(0.4, 0.9, 1.0, cost=20)]}, target=0.9)
    (row,) = comparison.table()
    assert (row["method"], row["seeds"]) == ("m", 2)
    assert row["accuracy"] == pytest.approx(0.8)
    assert row["spread"] == pytest.approx(0.08**0.5)  # 0.6 and 1.0 lie 0.2 from their mean: sqrt(2 * 0.04 / 1)
    assert row["best"] == pytest.approx(0.9)
    assert (row["bytes"], row["macs"]) == ((33 + 63) / 2, (60 + 120) / 2)
    assert (row["sim_seconds"], row["wall_seconds"]) == (1.5, 9.0)
    assert (row["reached"], row["rounds_to_target"], row["bytes_to_target"]) == (1, 2, 42)
    assert (row["sim_seconds_to_target"], row["macs_to_target"]) == (1.0, 80)


def test_one_seed_has_no_spread():
    assert Comparison({"m": [result(0.5)]}).table()[0]["spread"] is None


def test_a_target_that_nobody_reached():
    row = Comparison({"m": [result(0.5)]}, target=0.6).table()[0]
    assert (row["reached"], row["rounds_to_target"]) == (0, None)


def test_a_run_that_was_never_evaluated_does_not_count():
    row = Comparison({"m": [result(None, None), result(0.5, 0.4)]}).table()[0]
    assert (row["accuracy"], row["best"]) == (0.4, 0.5)
    assert Comparison({"m": [result(None)]}).table()[0]["accuracy"] is None


def test_the_table_is_made_from_the_histories():
    for row, (method, results) in zip(three().table(), three().results.items(), strict=True):
        ends = [r.history["accuracy"][-1] for r in results]
        sent = [sum(r.history["bytes_down"]) + sum(r.history["bytes_up"]) for r in results]
        assert row["method"] == method
        assert (row["accuracy"], row["spread"]) == (mean(ends), stdev(ends))
        assert (row["bytes"], row["macs"]) == (mean(sent), mean(sum(r.history["macs_work"]) for r in results))


# equal conditions -----------------------------------------------------------------------------------------------------
def test_methods_come_in_their_order_with_their_seeds():
    assert list(three().results) == METHODS
    assert all([r.recipe.seed for r in results] == [0, 1] for results in three().results.values())


def test_all_methods_meet_the_same_devices():
    for seed in (0, 1):
        devices = [results[seed].history["devices"] for results in three().results.values()]
        assert devices[0] == devices[1] == devices[2]


def test_seeds_meet_other_devices():
    one, two = three().results["fedavg"]
    assert one.history["devices"] != two.history["devices"]


def test_a_method_beside_others_is_the_method_alone():
    alone, beside = shoal.run("scaffold", seed=1, **TINY), three().results["scaffold"][1]
    assert alone.history.same_course(beside.history)
    assert all(torch.equal(alone.params[k], v) for k, v in beside.params.items())


def test_the_python_side_mirrors_the_command():
    call = cast(Any, getattr(shoal, "compare"))  # noqa: B009
    assert [row["method"] for row in call(["fedavg", "fedprox"], seeds=1, **TINY).table()] == ["fedavg", "fedprox"]


# folders --------------------------------------------------------------------------------------------------------------
def test_a_comparison_that_is_complete_is_only_read(tmp_path):
    recipe = Recipe(**TINY, out=str(tmp_path / "c"))
    first = compare(METHODS, recipe, 2)
    played: list[int] = []
    again = go_on(tmp_path / "c", lambda recipe, row, history: played.append(row["round"]))
    assert played == []
    assert [row | {"wall_seconds": 0} for row in again.table()] == [r | {"wall_seconds": 0} for r in first.table()]
    assert [row["accuracy"] for row in first.table()] == [row["accuracy"] for row in three().table()]


def test_methods_that_differ_only_in_signs_do_not_share_a_folder(tmp_path):
    compare(["fedprox(mu=0.1)", "fedprox(mu=0.1)+fedavg"], Recipe(**TINY, out=str(tmp_path / "c")))
    assert len(list((tmp_path / "c").rglob("history.jsonl"))) == 2


def test_one_bad_method_stops_all_before_the_first_round(tmp_path):
    with pytest.raises(shoal.ShoalError, match="fedprx"):
        compare(["fedavg", "fedprx"], Recipe(**TINY, out=str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("methods, seeds", [([], 1), (["fedavg"], 0), (["fedavg"], 1001), (["fedavg", "fedavg"], 1)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_comparison_that_cannot_be_made(methods, seeds, kind):
    with pytest.raises(shoal.ShoalError) as error:
        compare(kind(methods), RECIPE, seeds)
    assert error.value.kind.name == "bad-value"


@pytest.mark.parametrize(
    "text",
    ["", "methods = 5\nseeds = 1", "methods = ['fedavg']", "methods = [5]\nseeds = 1", "methods = []\nseeds = 1", "["],
)
def test_a_damaged_list_of_methods(tmp_path, text):
    (tmp_path / "compare.toml").write_text(text)
    with pytest.raises(shoal.ShoalError) as error:
        go_on(tmp_path)
    assert error.value.kind.name in ("damaged", "bad-recipe", "bad-value")


# budgets --------------------------------------------------------------------------------------------------------------
@cache
def long() -> History:
    return shoal.run(**LONG).history


def rounds(**budget: Any) -> int:
    stopped = shoal.run(**(LONG | budget)).history
    assert stopped.same_course(History(long().rows[: len(stopped)]))
    return len(stopped)


@pytest.mark.parametrize(
    "budget, columns",
    [
        ("until_seconds", ["sim_seconds"]),
        ("until_bytes", ["bytes_down", "bytes_up"]),
        ("until_macs", ["macs_work"]),
    ],
)
def test_a_budget_ends_the_round_in_which_it_is_spent(budget, columns):
    three = History(long().rows[:3]).total(*columns)
    assert rounds(**{budget: three}) == 3
    assert rounds(**{budget: three * 0.999}) == 3
    assert rounds(**{budget: three * 1.001}) == 4
    assert rounds(**{budget: 1e-9}) == 1
    assert rounds(**{budget: three * 100}) == 8


def test_an_accuracy_ends_the_round_that_reaches_it():
    accuracies = long()["accuracy"]
    best = max(accuracies)
    assert rounds(until_accuracy=best) == accuracies.index(best) + 1
    assert rounds(until_accuracy=min(1.0, best + 0.01)) == 8


def test_the_first_budget_that_is_spent_counts():
    one = long().rows[0]
    assert rounds(until_bytes=2.0 * (one["bytes_down"] + one["bytes_up"]), until_macs=1e15) == 2


def test_a_spent_budget_can_be_raised(tmp_path):
    one = long().rows[0]
    sent = float(one["bytes_down"] + one["bytes_up"])
    shoal.run(out=str(tmp_path / "x"), until_bytes=2 * sent, **LONG)
    assert len(shoal.resume(tmp_path / "x").history) == 2
    assert shoal.resume(tmp_path / "x", until_bytes=5 * sent).history.same_course(History(long().rows[:5]))


def test_evaluation_between_rounds_and_at_the_end():
    accuracies = shoal.run(**{**TINY, "rounds": 5, "eval_every": 2}).history["accuracy"]
    assert [a is not None for a in accuracies] == [False, True, False, True, True]


def test_the_last_round_is_evaluated_also_where_a_budget_ends_the_run():
    one = long().rows[0]
    sent = float(one["bytes_down"] + one["bytes_up"])
    assert shoal.run(**LONG, eval_every=4, until_bytes=3 * sent).history["accuracy"][-1] is not None
