"""Tuning by results: Optuna's samplers, tries that are given up, equal budgets, and the winners on the test half."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal import Recipe, ShoalError
from shoal.cli.commands import run_command_line
from shoal.compare import comparison
from shoal.compare.optuna_samplers import make_optuna_proposer
from shoal.compare.propose import JudgedTry
from shoal.compare.pruning import keep_above_median, keep_better_half, list_rungs
from shoal.compare.search_space import parse_search_space
from shoal.compare.tuning_spec import TuningSpec, read_tuning_file
from shoal.data.dataset import DATASETS

from test_tuning import TINY, make_poisoned_digits  # isort: skip

SPACE = ["lr=log:0.001:1", "fedprox.mu=0.01,0.1,1"]


def square(settings: dict[str, Any]) -> float:
    """A score that is best, 0, at lr 0.1 and mu 0.1."""
    from math import log10

    return -((log10(settings["lr"]) + 1) ** 2) - (log10(settings["fedprox.mu"]) + 1) ** 2


# samplers -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_a_sampler_goes_by_results_and_proposes_the_same_again(sampler):
    space = parse_search_space(SPACE)
    propose = make_optuna_proposer(sampler, 4, "up")
    judged: list[JudgedTry] = []
    while batch := propose(space, 24, 3, judged):
        assert len(batch) == 4 and batch == propose(space, 24, 3, judged)
        assert all(0.001 <= s["lr"] <= 1 and s["fedprox.mu"] in (0.01, 0.1, 1) for s in batch)
        assert len({tuple(s.items()) for s in batch}) > 1
        judged += [JudgedTry(s, square(s)) for s in batch]
    assert len(judged) == 24
    first, last = ([tried.score or 0.0 for tried in part] for part in (judged[:8], judged[-8:]))
    assert sum(last) > sum(first)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), max_size=6), st.sampled_from(["up", "down"]))
def test_a_sampler_takes_whatever_was_judged(results, better):
    space = parse_search_space(["lr=log:0.001:1", "augment=flip,crop:4"])
    judged = [
        JudgedTry({"lr": 0.01, "augment": "flip"}, None if diverged else score, 3, stopped)
        for score, diverged, stopped in results
    ]
    (settings,) = make_optuna_proposer("tpe", 1, better)(space, 7, 0, judged)
    assert settings["augment"] in ("flip", "crop:4") and 0.001 <= settings["lr"] <= 1


def test_what_the_spec_cannot_do_is_refused(monkeypatch):
    recipe = Recipe(**TINY)
    for values, kind in [
        ({"sampler": "tpee"}, "unknown-name"),
        ({"pruner": "halve"}, "unknown-name"),
        ({"final_seeds": -1}, "bad-value"),
        ({"side_by_side": 0}, "bad-value"),
    ]:
        with pytest.raises(ShoalError) as refused:
            TuningSpec(("fedavg",), recipe, ("lr=0.1,0.2",), **values)
        assert refused.value.kind.name == kind
    with pytest.raises(ShoalError, match="a range is given"):
        shoal.tune(["fedavg"], ["lr=log:0.1:1"], sampler="grid", **TINY)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ShoalError) as refused:
        shoal.tune(["fedavg"], ["lr=log:0.1:1"], sampler="tpe", **TINY)
    assert refused.value.kind.name == "missing-extra" and "shoal[tune]" in refused.value.advice


# giving up ------------------------------------------------------------------------------------------------------------
def test_whom_pruners_keep():
    assert keep_better_half([0.1, 0.4, 0.3, None, 0.4], (), "up") == [False, True, True, False, True]
    assert keep_better_half([0.1, 0.4, 0.3], (), "down") == [True, False, True]
    assert keep_better_half([0.5, 0.5], (), "up") == [True, False]
    assert keep_above_median([0.1, 0.4, 0.3, None], (), "up") == [False, True, True, False]
    assert keep_above_median([0.1], [0.2, 0.3], "up") == [False] and keep_above_median([0.1], [0.2], "down") == [True]
    assert keep_above_median([None], (), "up") == [False]
    assert [list_rungs(p, 20) for p in ("none", "median", "halving")] == [[20], [5, 10, 15, 20], [5, 10, 20]]
    assert list_rungs("median", 1) == [1]


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=12), st.sampled_from(["up", "down"]))
def test_half_of_any_scores_goes_on_and_nobody_better_is_given_up(scores, better):
    kept = keep_better_half(scores, (), better)
    assert sum(kept) == (len(scores) + 1) // 2
    worst_kept = [s for s, goes_on in zip(scores, kept) if goes_on]
    best_stopped = [s for s, goes_on in zip(scores, kept) if not goes_on and s is not None]
    for stopped in best_stopped:
        assert all(s is not None and (s >= stopped if better == "up" else s <= stopped) for s in worst_kept)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_every_method_has_the_same_budget_and_hopeless_tries_are_given_up(sampler):
    more: dict[str, Any] = TINY | {"rounds": 8}
    tuning = shoal.tune(["fedavg", "fedprox"], SPACE, tries=6, sampler=sampler, pruner="halving", **more)
    assert {len(tries) for tries in tuning.tries.values()} == {6}
    rounds = {method: tuning.count_rounds(method) for method in tuning.tries}
    assert len(set(rounds.values())) == 1 and rounds["fedavg"] < 6 * 8
    for method, tries in tuning.tries.items():
        best = tuning.find_best(method)
        assert best is not None and best.rounds == 8 and not best.is_stopped
        assert {t.rounds for t in tries if t.is_stopped} == {2, 4}
    plain = shoal.tune(["fedavg", "fedprox"], SPACE, tries=6, **more)
    assert {plain.count_rounds(method) for method in plain.tries} == {48}
    if sampler == "random":  # a try that was played to its end scores as if nobody had looked on the way
        for pruned, whole in zip(tuning.tries["fedavg"], plain.tries["fedavg"]):
            assert pruned.settings == whole.settings and (pruned.is_stopped or pruned.scores == whole.scores)


@pytest.mark.parametrize("sampler, pruner", [("tpe", "halving"), ("random", "median"), ("gp", "none")])
def test_a_tuning_by_results_that_was_stopped_ends_as_if_it_never_had(sampler, pruner, tmp_path):
    values: dict[str, Any] = {"tries": 4, "sampler": sampler, "pruner": pruner, "side_by_side": 2, "final_seeds": 1}
    values |= TINY | {"rounds": 5, "eval_every": 2}
    whole = shoal.tune(["fedavg", "fedprox"], SPACE, **values)
    for stop_at in (7, 29):
        rounds, folder = 0, tmp_path / str(stop_at)

        def stop(*row: Any) -> None:
            nonlocal rounds
            rounds += 1
            if rounds == stop_at:
                raise KeyboardInterrupt

        with pytest.raises(ShoalError):
            shoal.tune(["fedavg", "fedprox"], SPACE, watch=stop, out=folder, **values)
        resumed = shoal.resume(folder)
        assert resumed.table() == whole.table()
        assert resumed.final is not None and whole.final is not None
        for method, results in whole.final.results.items():
            for result, again in zip(results, resumed.final.results[method]):
                assert again.history.equals_except_wall_time(result.history)
        assert json.loads((folder / "tune.json").read_text()) == resumed.to_dict()
        assert read_tuning_file(folder).sampler == sampler


def test_a_batch_of_tries_trains_in_the_same_calls(monkeypatch):
    groups: list[int] = []
    finish = comparison.finish_group
    monkeypatch.setattr(
        comparison, "finish_group", lambda group, watch: groups.append(len(group)) or finish(group, watch)
    )
    shoal.tune(["fedavg"], ["lr=log:0.01:1"], tries=6, sampler="tpe", side_by_side=3, seeds=2, **TINY)
    assert groups == [6, 6]


# the winners ----------------------------------------------------------------------------------------------------------
def test_the_test_half_is_read_by_the_winners_alone(monkeypatch, tmp_path):
    """Poisoned, it breaks the first run of a winner, after every try was played to its end."""
    monkeypatch.setitem(DATASETS, "poisoned", make_poisoned_digits)
    played: list[tuple[float, int]] = []
    values: dict[str, Any] = TINY | {"data": "poisoned", "normalise": True, "out": tmp_path / "t"}
    watch = lambda recipe, row, history: played.append((recipe.validation, recipe.seed))  # noqa: E731
    with pytest.raises(AssertionError, match="the test half was read"):
        shoal.tune(["fedavg"], ["lr=0.1,0.2"], sampler="tpe", tries=2, seeds=2, final_seeds=1, watch=watch, **values)
    assert len(played) == 2 * 2 * TINY["rounds"] and {share for share, _ in played} == {0.1}
    tuning = shoal.tune(["fedavg"], ["lr=0.1,0.2"], sampler="tpe", tries=2, seeds=2, **values)
    assert tuning.final is None  # the same tuning, whose winners are not run


def test_winners_have_fresh_seeds_and_all_training_samples(tmp_path):
    tuning = shoal.tune(["fedavg", "fedprox"], ["lr=0.05,0.5"], seeds=2, final_seeds=3, out=tmp_path / "t", **TINY)
    assert tuning.final is not None
    for method, results in tuning.final.results.items():
        best = tuning.find_best(method)
        assert best is not None and [r.recipe.seed for r in results] == [2, 3, 4]
        assert all(r.recipe.validation == 0 and r.recipe.lr == best.settings["lr"] for r in results)
        again = shoal.run(**TINY | {"method": method, "lr": best.settings["lr"], "seed": 3})
        assert again.history.equals_except_wall_time(results[1].history)


def test_the_command_says_what_was_given_up_and_shows_the_winners(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = "tune fedavg --over lr=0.01,0.1,0.5,1 --pruner halving --final-seeds 2 --devices 6 --sample 3 --rounds 4"
    monkeypatch.setattr(sys, "argv", ["shoal", *words.split(), "--steps", "2", "--engine", "serial", "--out", "t"])
    with pytest.raises(SystemExit) as end:
        run_command_line()
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "given up after 1" in out and "given up after 2" in out and "Rounds played to choose: fedavg 8." in out
    assert "The winners on the test half, all training samples, seeds 1 to 2." in out
    assert json.loads(Path("t/tune.json").read_text())["final"][0]["method"] == "fedavg"
