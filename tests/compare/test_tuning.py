"""Tuning: what is proposed, who wins, and that neither the test half nor more tries for one method can decide it."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import History, Recipe, ShoalError
from shoal.cli.commands import run_command_line
from shoal.compare import comparison
from shoal.compare.propose import JudgedTry, count_tries, list_grid, propose_grid_or_draws
from shoal.compare.search_space import ValueList, ValueRange, apply_settings, parse_search_space
from shoal.compare.tuning import TuningSpec, run_tuning, score_run
from shoal.data.dataset import DATASETS, Dataset, read_digits
from shoal.data.user_data import hold_out_validation
from shoal.runs.recipe_command import format_recipe_flags
from shoal.runs.recipe_files import parse_recipe_pairs

TINY: dict[str, Any] = {"devices": 6, "sample": 3, "rounds": 4, "steps": "2", "batch": 8, "engine": "serial"}


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    try:
        run_command_line()
    except SystemExit as end:
        return int(end.code or 0), *capsys.readouterr()
    return 0, *capsys.readouterr()


# what is tried --------------------------------------------------------------------------------------------------------
def test_a_search_space_is_read():
    space = parse_search_space(["lr=log:0.001:1", "batch=8,16", "fedprox.mu=0.01,1", "fedap.rule=fixed,'x'"])
    assert space == {
        "lr": ValueRange(0.001, 1.0, True),
        "batch": ValueList((8, 16)),
        "fedprox.mu": ValueList((0.01, 1)),
        "fedap.rule": ValueList(("fixed", "x")),
    }
    assert [space["lr"].pick(share) for share in (0, 1 / 3, 0.5, 1)] == [0.001, 0.01, 0.03162, 1.0]
    assert [ValueList((1, 2, 3)).pick(share) for share in (0, 0.34, 0.99, 1.0)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "over, kind",
    [
        ([], "bad-value"),
        (["lr"], "bad-recipe"),
        (["lr=log:0:1"], "bad-value"),
        (["lr=log:1:0.1"], "bad-value"),
        (["lr=uniform:1"], "bad-value"),
        (["lr=log:a:b"], "bad-value"),
        (["lr=uniform:0:inf"], "bad-value"),
        (["lr=0.1,0.1"], "bad-value"),
        (["lr=0.1", "lr=0.2"], "bad-value"),
        (["lr=fast"], "bad-value"),
        (["augment=log:1:2"], "bad-value"),
        (["rounds=1,2"], "bad-value"),
        (["validation=0.1,0.2"], "bad-value"),
        (["data=digits,cifar10"], "bad-value"),
        (["rate=1,2"], "unknown-name"),
        (["fedpox.mu=1,2"], "unknown-name"),
        (["fedprox.nu=1,2"], "unknown-name"),
        (["fedprox.mu=-1,2"], "bad-value"),
        (["lr=-1,2"], "bad-value"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_trains(over, kind, tmp_path):
    with pytest.raises(ShoalError) as refused:
        shoal.tune(["fedprox"], over, watch=lambda *row: pytest.fail("a round"), out=tmp_path / "t", **TINY)
    assert refused.value.kind.name == kind and not (tmp_path / "t").exists()


@given(st.text(alphabet="lrfedpox.mu=:,0123456789-eainfog'\"[](){} ", max_size=40))
def test_any_text_is_a_search_space_or_refused_in_words(text):
    try:
        spec = TuningSpec(("fedprox",), Recipe(), (text,), 2)
        for settings in propose_grid_or_draws(spec.spaces["fedprox"], 2, 0):
            spec.make_recipes("fedprox", 0, settings)
    except ShoalError as error:
        assert error.problem and error.advice


@given(st.integers(1, 40), st.integers(0, 99), st.floats(1e-6, 1e3), st.floats(1.01, 1e4))
def test_draws_meet_every_part_of_a_range_once_and_stay_inside(tries, seed, low, factor):
    high = low * factor
    space = {"lr": ValueRange(low, high, True), "momentum": ValueRange(0.0, 0.9, False), "batch": ValueList((4, 8))}
    drawn = propose_grid_or_draws(space, tries, seed)
    assert drawn == propose_grid_or_draws(space, tries, seed) and len(drawn) == tries
    assert all(low <= d["lr"] <= high and 0 <= d["momentum"] <= 0.9 for d in drawn)
    parts = Counter(min(int(d["momentum"] / 0.9 * tries + 1e-3), tries - 1) for d in drawn)
    assert max(parts.values()) <= 2  # two only where rounding to four digits crosses a border
    assert abs(sum(d["batch"] == 4 for d in drawn) - tries / 2) <= 1
    assert propose_grid_or_draws(space, tries, seed, [JudgedTry({}, 0.5)]) == []


def test_a_grid_is_tried_whole_or_drawn_from_without_repetition():
    space = parse_search_space(["lr=0.1,0.2,0.3", "batch=4,8"])
    whole = list_grid(space)
    assert whole is not None and len(whole) == 6 and whole[1] == {"lr": 0.1, "batch": 8}
    assert propose_grid_or_draws(space, 6, 0) == whole
    some = propose_grid_or_draws(space, 4, 0)
    assert len(some) == 4 and all(settings in whole for settings in some)
    assert len({tuple(settings.items()) for settings in some}) == 4


def test_methods_share_the_values_of_what_they_share():
    spec = TuningSpec(("fedavg", "fedprox"), Recipe(), ("lr=log:0.01:1", "fedprox.mu=log:0.01:1"), 5)
    fedavg, fedprox = (propose_grid_or_draws(spec.spaces[m], spec.tries, 3) for m in spec.methods)
    assert [d["lr"] for d in fedavg] == [d["lr"] for d in fedprox]
    assert [set(d) for d in (fedavg[0], fedprox[0])] == [{"lr"}, {"lr", "fedprox.mu"}]


def test_every_method_has_the_same_number_of_tries():
    small, large = parse_search_space(["lr=0.1,0.2"]), parse_search_space(["lr=0.1,0.2", "batch=4,8"])
    drawn = parse_search_space(["lr=log:0.1:1"])
    assert count_tries({"a": small, "b": small}, 0) == 2
    assert count_tries({"a": small, "b": large}, 2) == 2
    assert count_tries({"a": drawn, "b": drawn}, 0) == 8 and count_tries({"a": drawn}, 3) == 3
    for spaces, tries in [({"a": small, "b": large}, 0), ({"a": small, "b": large}, 3), ({"a": small, "b": drawn}, 0)]:
        with pytest.raises(ShoalError, match="unequal|only 2"):
            count_tries(spaces, tries)


def test_settings_go_into_the_recipe_and_into_the_expression():
    recipe = Recipe(method="feddum", lr=0.1)
    changed = apply_settings(recipe, {"lr": 0.5, "batch": 11.6, "fedavgm.beta": 0.7})
    assert (changed.lr, changed.batch) == (0.5, 12)
    assert changed.method == "feddu+devicem+fedavgm(beta=0.7, ema=True, start='first')"
    assert apply_settings(Recipe(method="fedprox(mu=1)"), {"fedprox.mu": 0.2}).method == "fedprox(mu=0.2)"
    assert apply_settings(Recipe(method="fedavg"), {"lr": 0.2}).method == "fedavg"


# judging --------------------------------------------------------------------------------------------------------------
def make_history(*values: tuple[float | None, float | None], headline: str = "accuracy") -> History:
    costs = {"bytes_down": 1, "bytes_up": 1, "macs_work": 1, "sim_seconds": 1.0, "wall_seconds": 1.0}
    rows = [{"round": n, "accuracy": a, "loss": loss, **costs} for n, (a, loss) in enumerate(values)]
    return History(rows, headline=headline)


def test_a_run_is_judged_by_the_mean_of_its_last_evaluations():
    steady = [(0.1 * n, 1.0) for n in range(1, 8)]
    assert score_run(Recipe(rounds=7), make_history(*steady)) == pytest.approx(0.5)  # of 0.3 to 0.7
    sparse = [(None, None), (0.2, 1.0), (None, None), (0.4, 1.0), (0.9, 1.0)]
    assert score_run(Recipe(rounds=5, eval_every=2), make_history(*sparse)) == pytest.approx(0.5)
    assert score_run(Recipe(rounds=1, eval_every=2), make_history((0.3, 1.0))) == 0.3


def test_a_run_that_diverged_cannot_win_by_its_good_beginning():
    fell = [(0.1, 0.2), (0.1, 0.1), (0.1, None)]
    assert score_run(Recipe(rounds=3, headline="loss"), make_history(*fell, headline="loss")) is None
    assert score_run(Recipe(rounds=3), make_history(*fell)) is None
    tuning = shoal.tune(["fedavg"], ["lr=0.1,1e30"], **TINY)
    (first, second), best = tuning.tries["fedavg"], tuning.find_best("fedavg")
    assert second.score is None and best is first
    lost = shoal.tune(["fedavg"], ["lr=1e30,1e31"], **TINY)
    assert lost.find_best("fedavg") is None and lost.to_dict()["winners"] == {}
    with pytest.raises(ShoalError, match="diverged"):
        lost.make_recipe("fedavg")


def test_the_winner_has_the_best_mean_over_seeds_and_its_command_runs_it(tmp_path):
    tuning = shoal.tune(["fedavg", "fedprox"], ["lr=0.01,0.5", "fedprox.mu=0.1,1"], tries=2, seeds=2, **TINY)
    rows = tuning.table()
    assert Counter(row["method"] for row in rows) == {"fedavg": 2, "fedprox": 2}
    for row in rows:
        assert row["accuracy"] == pytest.approx(sum(row["seeds"]) / 2) and len(row["seeds"]) == 2
    best = max((row for row in rows if row["method"] == "fedavg"), key=lambda row: row["accuracy"])
    assert best["best"] and best["settings"] == {"lr": 0.5}
    words = tuning.format_command("fedprox").removeprefix("shoal run ").split(" --")
    pairs = [word.removeprefix("--").replace(" ", "=", 1).replace('"', "") for word in words]
    recipe = Recipe().with_values(**parse_recipe_pairs(pairs))
    assert recipe == tuning.make_recipe("fedprox") and recipe.validation == 0


def test_a_winner_on_objects_is_told_as_a_call():
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    tuning = shoal.tune(["fedprox"], ["fedprox.mu=0.1,1"], data=(x, y), model=torch.nn.Linear(4, 3), **TINY)
    call = tuning.format_command("fedprox")
    assert call.startswith("shoal.run('fedprox(mu=") and "data=data, model=model, devices=6" in call
    model = torch.nn.Linear(4, 3)
    result = eval(call, {"shoal": shoal, "data": (x, y), "model": model})
    assert result.recipe.validation == 0


def test_the_edge_of_what_was_tried_is_named():
    tuning = shoal.tune(["fedavg"], ["lr=0.001,0.002,0.5"], **TINY)
    assert tuning.list_edges("fedavg") == ["lr"]
    assert shoal.tune(["fedavg"], ["lr=0.001,0.5,1e6"], **TINY).list_edges("fedavg") == []


def test_whole_numbers_are_told_as_they_were_tried():
    """A range gives 9.791, and the batch was 10."""
    tuning = shoal.tune(["fedprox"], ["batch=uniform:8:16", "fedprox.mu=log:0.01:1"], tries=3, seed=1, **TINY)
    for row, tried in zip(tuning.table(), tuning.tries["fedprox"], strict=True):
        assert type(row["settings"]["batch"]) is int and row["settings"]["batch"] == tried.recipes[0].batch
        assert row["settings"]["fedprox.mu"] == tried.settings["fedprox.mu"]
    (winner,), best = tuning.to_dict()["winners"].values(), tuning.find_best("fedprox")
    assert best and winner["settings"]["batch"] == best.recipes[0].batch


def test_less_of_a_loss_wins():
    tuning = shoal.tune(["fedavg"], ["lr=0.0001,0.5"], headline="loss", **TINY)
    best = tuning.find_best("fedavg")
    assert tuning.better == "down" and best and best.settings == {"lr": 0.5}


# test data ------------------------------------------------------------------------------------------------------------
class Poison(torch.Tensor):
    """A tensor that raises as soon as anything is computed from it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"the test half was read by {getattr(func, '__name__', func)}")


def make_poisoned_digits() -> Dataset:
    digits = read_digits()
    test_inputs, test_targets = (t.as_subclass(Poison) for t in (digits.test_inputs, digits.test_targets))
    return replace(digits, name="poisoned", test_inputs=test_inputs, test_targets=test_targets)


@pytest.mark.parametrize("given", [{}, {"validation": 0.0}, {"validation": 0.2, "stratify_validation": False}])
def test_tuning_never_reads_the_test_half(given, monkeypatch, tmp_path):
    """Nothing may be computed from it, whatever the recipe says. A plain run does so, hence the poison works."""
    monkeypatch.setitem(DATASETS, "poisoned", make_poisoned_digits)
    full = TINY | {"data": "poisoned", "normalise": True, "metrics": ("devices", "per_class", "local"), **given}
    tuning = shoal.tune(
        ["fedprox"], ["fedprox.mu=0.1,1"], seeds=2, server_data="per-class:2", out=tmp_path / "t", **full
    )
    assert all(math.isfinite(row["accuracy"]) for row in tuning.table())
    assert tuning.spec.recipe.validation == (given.get("validation") or 0.1)
    shoal.resume(tmp_path / "t", rounds=5)
    with pytest.raises(AssertionError, match="the test half was read"):
        shoal.run("fedprox", **TINY, data="poisoned")


def test_validation_holds_the_same_share_of_every_class_back():
    digits = read_digits()
    held = hold_out_validation(digits, 0.1, 3, stratify=True)
    assert len(held.test_targets) == round(0.1 * len(digits.targets))
    assert len(held.targets) + len(held.test_targets) == len(digits.targets)
    counts, all_counts = (torch.bincount(t, minlength=10) for t in (held.test_targets, digits.targets))
    assert ((counts - 0.1 * all_counts).abs() < 1).all()
    other = hold_out_validation(digits, 0.1, 4, stratify=True)
    assert not torch.equal(held.test_inputs, other.test_inputs)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=60), st.floats(0.05, 0.9), st.integers(0, 9))
def test_a_stratified_share_is_right_for_any_labels(labels, share, seed):
    if not 0 < round(share * len(labels)) < len(labels):
        return
    y, x = torch.tensor(labels), torch.arange(len(labels)).float().unsqueeze(1)
    held = hold_out_validation(Dataset("own", x, y, x[:0], y[:0], 4), share, seed, stratify=True)
    assert sorted((*held.inputs.flatten().tolist(), *held.test_inputs.flatten().tolist())) == list(range(len(labels)))
    part = len(held.test_targets) / len(labels)
    for c in range(4):
        assert abs(int((held.test_targets == c).sum()) - part * labels.count(c)) < 1 + 1e-9


# folders --------------------------------------------------------------------------------------------------------------
def test_a_tuning_that_was_stopped_ends_as_if_it_never_had(tmp_path):
    over = ["lr=log:0.01:1", "fedprox.mu=0.1,1"]
    whole = shoal.tune(["fedavg", "fedprox"], over, tries=3, seeds=2, **TINY)
    rounds = 0

    def stop(*row):
        nonlocal rounds
        rounds += 1
        if rounds == 17:
            raise KeyboardInterrupt

    folder = tmp_path / "t"
    with pytest.raises(ShoalError) as stopped:
        shoal.tune(["fedavg", "fedprox"], over, tries=3, seeds=2, watch=stop, out=folder, **TINY)
    assert stopped.value.kind.name == "interrupted" and f"shoal resume {folder}" in stopped.value.advice
    played: list[int] = []
    again = shoal.tune(
        ["fedavg", "fedprox"], over, tries=3, seeds=2, watch=lambda r, row, h: played.append(row["round"]), out=folder,
        **TINY,
    )  # fmt: skip
    assert again.table() == whole.table() and len(played) < 2 * 3 * 2 * TINY["rounds"] - 12
    assert json.loads((folder / "tune.json").read_text()) == again.to_dict()
    read = shoal.resume(folder, watch=lambda *row: pytest.fail("a finished run was played again"))
    assert read.table() == whole.table()
    longer = shoal.resume(folder, rounds=5)
    assert longer.spec.recipe.rounds == 5 and longer.spec.recipe.out == str(folder)


def test_a_folder_of_another_tuning_is_refused(tmp_path):
    shoal.tune(["fedavg"], ["lr=0.1,0.2"], out=tmp_path / "t", **TINY)
    for change in ({"over": ["lr=0.1,0.3"]}, {"seeds": 2}, {"batch": 4}, {"methods": ["fedprox"]}):
        values: dict[str, Any] = {"methods": ["fedavg"], "over": ["lr=0.1,0.2"], "out": tmp_path / "t", **TINY} | change
        with pytest.raises(ShoalError) as refused:
            shoal.tune(**values)
        assert refused.value.kind.name == "other-recipe"
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    with pytest.raises(ShoalError) as refused:
        shoal.tune(["fedavg"], ["lr=0.1,0.2"], out=tmp_path / "full", **TINY)
    assert refused.value.kind.name == "folder-exists"
    (tmp_path / "t/tune.toml").write_text('methods = "fedavg"\n')
    with pytest.raises(ShoalError) as refused:
        shoal.resume(tmp_path / "t")
    assert refused.value.kind.name == "damaged"


def test_tries_of_a_method_train_in_the_same_calls(monkeypatch):
    """One group for each method: what differs are numbers, of the recipe and of parts."""
    groups: list[list[Recipe]] = []
    finish = comparison.finish_group
    monkeypatch.setattr(comparison, "finish_group", lambda group, watch: groups.append(group) or finish(group, watch))
    shoal.tune(["fedavg", "fedprox"], ["lr=log:0.01:1", "fedprox.mu=log:0.1:1"], tries=3, seeds=2, **TINY)
    assert [len(group) for group in groups] == [6, 6]


def test_another_proposer_sees_what_was_judged():
    """A sampler that goes by results: it halves the rate until that helps no more."""

    def halve(space, tries, seed, judged):
        if len(judged) == tries:
            return []
        return [{"lr": 1.0 if not judged else judged[-1].settings["lr"] / 2}]

    spec = TuningSpec(("fedavg",), Recipe(**TINY), ("lr=log:0.01:1",), 3)
    tuning = run_tuning(spec, propose=halve)
    assert [t.settings["lr"] for t in tuning.tries["fedavg"]] == [1.0, 0.5, 0.25]


# the command ----------------------------------------------------------------------------------------------------------
def test_the_command_tells_what_was_tried_and_how_to_run_the_winner(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = ["--devices", "6", "--sample", "3", "--rounds", "3", "--steps", "2", "--engine", "serial"]
    words = ["tune", "fedavg", "fedprox", "--over", "lr=0.01,0.5", "--over", "fedprox.mu=0.1,1", "--tries", "2", *flags]
    code, out, err = command(monkeypatch, capsys, *words, "--out", "t")
    assert code == 0 and "The test half was not looked at." in out and "validation accuracy" in out
    assert "shoal run --method fedavg --devices 6 --sample 3 --rounds 3 --steps 2 --lr 0.5 --engine serial" in out
    code, out, err = command(monkeypatch, capsys, "resume", "t", "--json")
    assert code == 0 and json.loads(out) == json.loads(Path("t/tune.json").read_text())
    assert command(monkeypatch, capsys, *words, "--method", "x")[0] == 11
    assert command(monkeypatch, capsys, *words, "--quiet", "--out", "t")[:2] == (0, "")


@pytest.mark.parametrize(
    "label, order, how",
    [
        ("kind", "", "held back class by class"),
        ("price", "", "drawn at random"),
        ("kind", "day", "the newest ones"),
        ("price", "day", "the newest ones"),
    ],
)
def test_the_command_tells_how_validation_samples_were_chosen(monkeypatch, capsys, tmp_path, label, order, how):
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 7},{i},{i * 0.37 + 0.05:.3f},{'ab'[i % 3 == 0]}" for i in range(60)]
    Path("rows.csv").write_text("\n".join(["size,day,price,kind", *lines]))
    words = ["tune", "fedavg", "--over", "lr=0.01,0.1", "--data", "rows.csv", "-s", f"label={label}"]
    words += ["--devices", "3", "--sample", "3", "--rounds", "1", "--steps", "1", "--batch", "4", "--engine", "serial"]
    code, out, err = command(monkeypatch, capsys, *words, *(["-s", f"order={order}"] if order else []))
    assert code == 0 and f"10 % of the training samples, {how}; 2 tries of each method" in out, err


@settings(max_examples=30)
@given(st.floats(0, 10), st.booleans(), st.sampled_from(["fedavg", "fedap(rule='fixed')+fedprox(mu=0.5)"]))
def test_flags_of_a_recipe_say_it(lr, nesterov, method):
    recipe = Recipe(lr=lr, nesterov=nesterov, method=method)
    flags = [flag.removeprefix("--").partition(" ") for flag in format_recipe_flags(recipe, ("method",))]
    given = {key.replace("-", "_"): value.strip('"') for key, _, value in flags}
    given |= {"nesterov": "true"} if nesterov else {}
    assert Recipe().with_values(**parse_recipe_pairs([f"{k}={v}" for k, v in given.items()])) == recipe
