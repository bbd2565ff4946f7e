"""Comparisons: the numbers in the table, equal conditions for all, and budgets that stop in time."""

import itertools
from dataclasses import replace
from functools import cache
from statistics import mean, stdev
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import shoal
from shoal import History, Recipe, Result
from shoal.cli.comparison_tables import format_further_metrics, make_budget_tables
from shoal.compare.budgets import Budgets
from shoal.compare.comparison import Comparison, play_all_runs, resume_comparison, run_comparison
from shoal.compare.run_groups import group_similar_recipes

TINY: dict[str, Any] = {"devices": 6, "sample": 3, "rounds": 4, "steps": "2", "batch": 8}
RECIPE = Recipe(**TINY)
LONG: dict[str, Any] = TINY | {"rounds": 8}
METHODS = ["fedavg", "fedprox(mu=0.1)", "scaffold"]


@cache
def three() -> Comparison:
    return run_comparison(METHODS, RECIPE, 2)


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


def test_a_loss_from_before_a_run_diverged_is_not_its_end():
    """A history has None in place of what is not finite; that of a round that is not evaluated says nothing."""
    good, bad = result(0.5, 0.6, None), result(0.5, 0.1, None)
    for r, losses in ((good, (1.5, 1.0, None)), (bad, (0.5, None, None))):
        rows = [row | {"loss": loss} for row, loss in zip(r.history.rows, losses)]
        object.__setattr__(r, "history", History(rows, headline="loss"))
    rows = Comparison({"good": [good], "bad": [bad]}).table()
    assert [row["accuracy"] for row in rows] == [1.0, None] and [row["best"] for row in rows] == [1.0, 0.5]
    assert "loss" not in repr(bad.history).partition("(best")[0]


def test_runs_of_another_headline_are_no_numbers_of_this_column():
    other = result(0.5)
    object.__setattr__(other, "history", History([other.history.rows[0] | {"mae": 3.0}], headline="mae"))
    comparison = Comparison({"m": [result(0.25)], "n": [other]}, target=0.2)
    first, second = comparison.table()
    assert (first["accuracy"], second["accuracy"], second["best"], second["spread"]) == (0.25, None, None, None)
    assert (first["reached"], second["reached"]) == (1, 0)
    assert [at["accuracy"] for at in second["at_budgets"]] == [None, None]


@pytest.mark.parametrize("vary", ["headline=accuracy,loss", "target=0.1,0.9"])
def test_what_a_comparison_is_about_cannot_be_varied(vary):
    with pytest.raises(shoal.ShoalError, match="cannot be varied"):
        run_comparison(["fedavg"], RECIPE, vary=[vary])


def test_the_table_is_made_from_the_histories():
    for row, (method, results) in zip(three().table(), three().results.items(), strict=True):
        ends = [r.history["accuracy"][-1] for r in results]
        sent = [sum(r.history["bytes_down"]) + sum(r.history["bytes_up"]) for r in results]
        assert row["method"] == method
        assert (row["accuracy"], row["spread"]) == (mean(ends), stdev(ends))
        assert (row["bytes"], row["macs"]) == (mean(sent), mean(sum(r.history["macs_work"]) for r in results))


# at equal cost --------------------------------------------------------------------------------------------------------
def course(*accuracies: float | None, seed: int = 0, seconds: float = 1.0, sent: int = 10, **more: Any) -> Result:
    """A result whose rounds all cost the same: so many seconds, so many bytes down and 5 up."""
    costs = {"bytes_down": sent - 5, "bytes_up": 5, "macs_work": 1, "sim_seconds": seconds, "wall_seconds": 1.0}
    rows = [{"round": n, "accuracy": a, **costs, **more} for n, a in enumerate(accuracies)]
    return Result(Recipe(seed=seed), History(rows), cast(Any, None), {})


def told(found: list[dict[str, Any]]) -> list[tuple]:
    return [(at["cost"], at["budget"], at["accuracy"]) for at in found]


TWO = Comparison({"slow": [course(0.1, 0.2, 0.3, seconds=2.0)], "fat": [course(0.4, 0.5, 0.6, sent=20)]})


def test_the_default_budget_is_what_the_cheapest_method_spent():
    """In all, slow took 6 seconds and 30 bytes, fat 3 seconds and 60 bytes."""
    found = TWO.at_budgets()
    assert told(found["slow"]) == [("seconds", 3.0, 0.1), ("bytes", 30, 0.3)]
    assert told(found["fat"]) == [("seconds", 3.0, 0.6), ("bytes", 30, 0.4)]
    assert [row["at_budgets"] for row in TWO.table()] == list(found.values())


def test_budgets_that_were_asked_for():
    found = TWO.at_budgets(seconds=[4, 1.0], bytes=[25])
    assert told(found["slow"]) == [("seconds", 1.0, None), ("seconds", 4.0, 0.2), ("bytes", 25.0, 0.2)]
    assert told(found["fat"]) == [("seconds", 1.0, 0.4), ("seconds", 4.0, 0.6), ("bytes", 25.0, 0.4)]
    assert replace(TWO, budgets=Budgets((4, 1.0), (25,))).at_budgets() == found
    assert told(TWO.at_budgets(bytes=[10])["fat"]) == [("seconds", 3.0, 0.6), ("bytes", 10.0, None)]


def test_the_mean_and_spread_of_the_seeds_that_fit():
    seeds = [course(0.2, 0.5), course(0.4, 0.7, seed=1), course(0.9, 0.9, seed=2, seconds=5.0)]
    at, _ = Comparison({"m": seeds}).at_budgets(seconds=[1.5])["m"]
    assert (at["accuracy"], at["spread"], at["seeds"]) == (pytest.approx(0.3), pytest.approx(0.02**0.5), 2)
    at, _ = Comparison({"m": seeds}).at_budgets(seconds=[0.5])["m"]
    assert (at["accuracy"], at["spread"], at["seeds"]) == (None, None, 0)


def test_the_cheapest_is_looked_for_seed_by_seed():
    """Seed 1 draws slower devices; the cheaper method counts to its end under both."""
    cheap = [course(0.1, 0.2), course(0.3, 0.4, seed=1, seconds=3.0)]
    dear = [course(0.5, 0.6, seconds=1.5), course(0.7, 0.8, seed=1, seconds=4.5)]
    found = Comparison({"cheap": cheap, "dear": dear}).at_budgets()
    assert [found[m][0]["budget"] for m in found] == [4.0, 4.0]  # 2 seconds under seed 0, 6 under seed 1
    assert [found[m][0]["accuracy"] for m in found] == [pytest.approx(0.3), pytest.approx(0.6)]


def test_methods_of_different_seeds_still_have_equal_budgets():
    long, short = course(0.1, 0.2, 0.3, 0.4), course(0.5, 0.6, seed=7)
    found = Comparison({"long": [long], "short": [short]}).at_budgets()
    assert told(found["long"]) == [("seconds", 2.0, 0.2), ("bytes", 20, 0.2)]
    assert told(found["short"]) == [("seconds", 2.0, 0.6), ("bytes", 20, 0.6)]


def test_a_method_that_costs_nothing_leaves_the_others_their_budget():
    free = Result(Recipe(), History([{"round": 0, "accuracy": 0.9}]), cast(Any, None), {})
    found = Comparison({"free": [free], "m": [course(0.1, 0.2)]}).at_budgets()
    assert told(found["free"]) == [("seconds", 2.0, 0.9), ("bytes", 20, 0.9)]
    assert told(found["m"]) == [("seconds", 2.0, 0.2), ("bytes", 20, 0.2)]


runs = st.lists(
    st.builds(
        lambda accuracies, seconds, sent: (accuracies, seconds, sent),
        st.lists(st.none() | st.integers(0, 100).map(lambda n: n / 100), min_size=1, max_size=6),
        st.floats(0.01, 100),
        st.integers(6, 10**6),
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None)
@given(st.lists(runs, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_budgets_do_not_depend_on_any_order(drawn, random):
    made = {
        f"m{n}": [course(*a, seed=s, seconds=t, sent=b) for s, (a, t, b) in enumerate(own)]
        for n, own in enumerate(drawn)
    }
    mixed = random.sample(list(made), len(made))
    other = Comparison({m: random.sample(made[m], len(made[m])) for m in mixed}).at_budgets()
    found = Comparison(made).at_budgets()
    assert {m: [approximately(at) for at in own] for m, own in other.items()} == found
    for (method, own), nth in itertools.product(found.items(), (0, 1)):
        column = ("sim_seconds",) if nth == 0 else ("bytes_down", "bytes_up")
        assert own[nth]["budget"] <= max(r.history.total(*column) for r in made[method]) * (1 + 1e-12)


def approximately(at: dict[str, Any]) -> Any:
    return at | {k: pytest.approx(at[k], abs=1e-12) for k in ("budget", "accuracy", "spread") if at[k] is not None}


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), 10**400, True, "many", None])
@pytest.mark.parametrize("kind", ["seconds", "bytes"])
def test_a_budget_that_is_none(kind, wrong):
    with pytest.raises(shoal.ShoalError, match=f"{kind} is no cost .* Give a number of {kind} above 0") as error:
        Budgets(**{kind: (1.0, wrong)})
    assert error.value.kind.name == "bad-value"


def test_a_real_comparison_at_equal_cost(tmp_path):
    """scaffold sends twice as much as fedavg, so it has half of the rounds for the same bytes."""
    recipe = Recipe(**TINY, out=str(tmp_path / "c"))
    whole = run_comparison(["fedavg", "scaffold"], recipe, budgets=Budgets(bytes=(1e6,)))
    for method, [result] in whole.results.items():
        at_seconds, at_bytes = whole.at_budgets()[method]
        assert at_bytes["budget"] == 1e6 and at_bytes["accuracy"] == by_search(result.history, 1e6)
        assert at_seconds["budget"] == whole.results["fedavg"][0].history.total("sim_seconds")
    assert whole.at_budgets()["fedavg"][0]["accuracy"] == whole.results["fedavg"][0].accuracy
    halves = replace(whole, budgets=Budgets()).at_budgets()
    assert halves["scaffold"][1]["accuracy"] == whole.results["scaffold"][0].history["accuracy"][1]
    assert resume_comparison(tmp_path / "c").at_budgets() == whole.at_budgets()


def by_search(history: History, budget: float) -> float | None:
    fitting = [n for n in range(1, 5) if History(history.rows[:n]).total("bytes_down", "bytes_up") <= budget]
    return history["accuracy"][fitting[-1] - 1] if fitting else None


def shown(comparison: Comparison) -> list[str]:
    """The lines of the small tables as a terminal of 80 columns shows them."""
    console = Console(width=80)
    with console.capture() as made:
        console.print(*make_budget_tables(comparison))
    return [" ".join(text.split()) for text in made.get().splitlines() if any(c.isalnum() for c in text)]


def test_the_small_table_below_the_first():
    assert shown(TWO) == ["at equal cost within 3 s within 30 B", "slow 0.100 0.300", "fat 0.600 0.400"]
    several = Comparison({"m": [course(0.5), course(0.6, seed=1, seconds=9.0)]}, budgets=Budgets((1, 10), (5, 11)))
    assert shown(several)[1:] == ["m 1/2: 0.500 0.550 ± 0.071 - 0.550 ± 0.071"]


def test_one_method_alone_has_no_equals_unless_asked():
    alone = Comparison({"m": [course(0.5)]})
    assert (
        make_budget_tables(alone) == [] and len(make_budget_tables(replace(alone, budgets=Budgets(bytes=(30,))))) == 1
    )


def test_many_budgets_make_several_tables_that_fit_a_terminal():
    seeds = [course(0.5), course(0.6, seed=1)]
    many = Comparison({"fedprox(mu=0.1)": seeds, "b": seeds}, budgets=Budgets(tuple(range(1, 7)), (30, 40)))
    heads = [text for text in shown(many) if text.startswith("at equal cost")]
    assert [text.count("within") for text in heads] == [4, 2, 2]
    assert not any("…" in text for text in shown(many))


def test_where_the_budgets_come_from_is_said():
    assert "cheapest" in Budgets().describe() and "given" not in Budgets().describe()
    assert "given" in Budgets((1,), (1,)).describe() and "cheapest" not in Budgets((1,), (1,)).describe()
    assert Budgets((1,)).describe().endswith("given; for bytes, within what the cheapest method spent in all.")


def test_bytes_with_blocks_counted_alike_are_told_where_a_method_has_them():
    both = Comparison({"all": [course(0.1)], "some": [course(0.1, 0.2, bytes_down_by_blocks=600)]})
    first, second = both.table()
    assert "bytes_down_by_blocks" not in first and second["bytes_down_by_blocks"] == 1200
    assert format_further_metrics(both) == ["bytes down, blocks counted alike: some 1.2 kB"]
    assert format_further_metrics(TWO) == []


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
    assert alone.history.equals_except_wall_time(beside.history)
    assert all(torch.equal(alone.params[k], v) for k, v in beside.params.items())


def test_runs_with_other_splits_train_in_the_same_calls_to_the_same_numbers():
    base = RECIPE.with_values(engine="batched", width=3, precision="float64", lr=0.1, epochs="1", steps="")
    recipes = [base.with_values(split=split) for split in ("iid", "dirichlet:0.3", "shards:2")]
    assert [len(group) for group in group_similar_recipes(recipes)] == [3]
    beside = play_all_runs({"fedavg": recipes}, 0.0, None).results["fedavg"]
    for recipe, found in zip(recipes, beside):
        alone = play_all_runs({"fedavg": [recipe]}, 0.0, None).results["fedavg"][0]
        assert [row["bytes_up"] for row in found.history.rows] == [row["bytes_up"] for row in alone.history.rows]
        for name, value in alone.params.items():
            torch.testing.assert_close(found.params[name], value, rtol=0, atol=1e-9)
    assert not torch.allclose(beside[0].params["fc1.weight"], beside[1].params["fc1.weight"], rtol=0, atol=1e-6)


def test_the_python_side_mirrors_the_command():
    call = cast(Any, getattr(shoal, "compare"))  # noqa: B009
    assert [row["method"] for row in call(["fedavg", "fedprox"], seeds=1, **TINY).table()] == ["fedavg", "fedprox"]


# folders --------------------------------------------------------------------------------------------------------------
def test_a_comparison_that_is_complete_is_only_read(tmp_path):
    recipe = Recipe(**TINY, out=str(tmp_path / "c"))
    first = run_comparison(METHODS, recipe, 2)
    played: list[int] = []
    again = resume_comparison(tmp_path / "c", lambda recipe, row, history: played.append(row["round"]))
    assert played == []
    assert [row | {"wall_seconds": 0} for row in again.table()] == [r | {"wall_seconds": 0} for r in first.table()]
    assert [row["accuracy"] for row in first.table()] == [row["accuracy"] for row in three().table()]


def test_methods_that_differ_only_in_signs_do_not_share_a_folder(tmp_path):
    run_comparison(["fedprox(mu=0.1)", "fedprox(mu=0.1)+fedavg"], Recipe(**TINY, out=str(tmp_path / "c")))
    assert len(list((tmp_path / "c").rglob("history.jsonl"))) == 2


def test_one_bad_method_stops_all_before_the_first_round(tmp_path):
    with pytest.raises(shoal.ShoalError, match="fedprx"):
        run_comparison(["fedavg", "fedprx"], Recipe(**TINY, out=str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("methods, seeds", [([], 1), (["fedavg"], 0), (["fedavg"], 1001), (["fedavg", "fedavg"], 1)])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_comparison_that_cannot_be_made(methods, seeds, kind):
    with pytest.raises(shoal.ShoalError) as error:
        run_comparison(kind(methods), RECIPE, seeds)
    assert error.value.kind.name == "bad-value"


@pytest.mark.parametrize(
    "text",
    ["", "methods = 5\nseeds = 1", "methods = ['fedavg']", "methods = [5]\nseeds = 1", "methods = []\nseeds = 1", "["]
    + [f"methods = ['fedavg']\nseeds = 1\nbudget_{wrong}" for wrong in ("bytes = 5", "seconds = ['a']", "bytes = [0]")],
)
def test_a_damaged_list_of_methods(tmp_path, text):
    (tmp_path / "compare.toml").write_text(text)
    with pytest.raises(shoal.ShoalError) as error:
        resume_comparison(tmp_path)
    assert error.value.kind.name in ("damaged", "bad-recipe", "bad-value")


# budgets --------------------------------------------------------------------------------------------------------------
@cache
def long() -> History:
    return shoal.run(**LONG).history


def rounds(**budget: Any) -> int:
    stopped = shoal.run(**(LONG | budget)).history
    assert stopped.equals_except_wall_time(History(long().rows[: len(stopped)]))
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
    assert shoal.resume(tmp_path / "x", until_bytes=5 * sent).history.equals_except_wall_time(History(long().rows[:5]))


def test_evaluation_between_rounds_and_at_the_end():
    accuracies = shoal.run(**{**TINY, "rounds": 5, "eval_every": 2}).history["accuracy"]
    assert [a is not None for a in accuracies] == [False, True, False, True, True]


def test_the_last_round_is_evaluated_also_where_a_budget_ends_the_run():
    one = long().rows[0]
    sent = float(one["bytes_down"] + one["bytes_up"])
    assert shoal.run(**LONG, eval_every=4, until_bytes=3 * sent).history["accuracy"][-1] is not None
