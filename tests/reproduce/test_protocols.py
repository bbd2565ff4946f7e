"""Protocols of tables: how each reads its figures, by hand; that `fair` picks nothing by test data; what is refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from shoal import History, ShoalError
from shoal.cli.commands import run_command_line
from shoal.models import build_model
from shoal.reproduce.equal_costs import compare_methods
from shoal.reproduce.figures import find_published, make_figures, measure_metric
from shoal.reproduce.intervals import compute_interval, find_student_factor
from shoal.reproduce.metric_readers import EQUAL, MEAN_OF_LIST, MINUS_FEDAVG, READERS
from shoal.reproduce.protocol import expand_choices
from shoal.reproduce.reading import Clock, Reading
from shoal.reproduce.run import reproduce_table
from shoal.reproduce.sheet import CHOSEN, EQUAL_COST, INTERVAL
from shoal.reproduce.table_file import SHIPPED, build_table, read_table

NAMES = sorted(file.stem for file in SHIPPED.glob("*.toml"))
WITH_AUTHORS = [name for name in NAMES if read_table(name).authors]
FILE = """
[base]
data = "digits"
devices = 4
sample = 2
rounds = 4
steps = "1"
batch = 8
engine = "serial"
[fair.set]
lr = 0.2
[fair.tuned]
FedProx = "fedprox(mu=0.5)"
[authors]
maximum = true
notes = ["as their code has it"]
[authors.set]
lr = 0.3
[authors.run]
FedProx = "fedprox(mu={0.1|1.0})"
[authors.clock]
up = 6.25
down = 12.5
devices = 2
[authors.clock.models]
"mlp digits" = { training = 2.0, params = 100000, macs = 5000 }
[[column]]
name = "A"
set = { target = 0.01, model = "mlp" }
[[row]]
method = "FedAvg"
run = "fedavg"
[[row]]
method = "FedProx"
run = "fedprox(mu=0.1)"
published = { A = { acc = 0.5, "time_s_to_0.01" = 100 } }
"""


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path


def make_run(accuracies, macs: int = 1_000, bytes_up: int = 1_000, seconds: float = 1.0, **columns) -> History:
    costs = {"bytes_down": 1_000, "bytes_up": bytes_up, "macs_work": 1, "sim_seconds": seconds, "wall_seconds": 1.0}
    return History(
        [
            {"round": n, "accuracy": a, "macs_forward": macs, **costs, **{k: own[n] for k, own in columns.items()}}
            for n, a in enumerate(accuracies)
        ]
    )


def keys(**changes: Any) -> dict[str, Any]:
    return {"column": [{"name": "A"}], "row": [{"method": "FedAvg", "run": "fedavg"}]} | changes


# readings by hand -----------------------------------------------------------------------------------------------------
def test_the_mean_of_the_last_twenty():
    """0.80, 0.81, ..., 0.99; rounds without an evaluation do not count."""
    curve = [n / 100 for n in range(100)]
    assert measure_metric("acc", [make_run(curve)], Reading(last=20))[0] == pytest.approx(0.895)
    sparse = [value for pair in zip(curve, [None] * 100) for value in pair]
    assert measure_metric("acc", [make_run(sparse)], Reading(last=20))[0] == pytest.approx(0.895)
    assert measure_metric("acc", [make_run(curve[:3])], Reading(last=20))[0] == pytest.approx(0.01)


def test_the_maximum_of_the_smoothed_curve():
    """A parabola is left as it is, also at its ends; one round alone counts by the middle weight of the filter.

    That is 3 (3 m^2 + 3 m - 1) / ((2 m - 1) (2 m + 1) (2 m + 3)) for windows of 2 m + 1, here m = 19.
    """
    reading = Reading(maximum=True, smooth=(39, 3))
    parabola = [0.5 - ((n - 50) / 100) ** 2 for n in range(120)]
    assert measure_metric("acc", [make_run(parabola)], reading)[0] == pytest.approx(0.5)
    rising = [n / 200 for n in range(100)]
    assert measure_metric("acc", [make_run(rising)], reading)[0] == pytest.approx(0.495), "edges are fitted"
    spike = [1.0 if n == 60 else 0.0 for n in range(120)]
    assert measure_metric("acc", [make_run(spike)], reading)[0] == pytest.approx(3 * 1139 / (37 * 39 * 41))
    assert measure_metric("acc", [make_run(spike)], Reading(maximum=True))[0] == 1.0
    assert measure_metric("acc", [make_run(spike[:61])], replace(reading, smooth=(99, 3)))[0] == 1.0, "too few points"


def test_the_first_crossing_of_the_smoothed_curve():
    """A line is left as it is: 0.535 is reached with the 0.54 of round 55. One round above a target is no crossing."""
    reading = Reading(last=20, smooth=(39, 3))
    line = [n / 100 for n in range(100)]
    assert measure_metric("rounds_to_0.535", [make_run(line)], reading)[0] == 55
    jump = line[:20] + [0.9] + line[21:]
    assert measure_metric("rounds_to_0.54", [make_run(jump)], Reading())[0] == 21
    later = measure_metric("rounds_to_0.54", [make_run(jump)], reading)[0]
    assert isinstance(later, float) and 50 < later < 60
    assert measure_metric("rounds_to_1.5", [make_run(line)], reading) == ("never", None, 0)


PUBLISHED_ROUNDS = {
    "FedAvg": (245, 164, 441, 142, 131, 463),
    "ServerM": (112, 111, 185, 192, 141, 445),
    "DeviceM": (126, 110, 150, 88, 82, 288),
    "FedDA": (128, 109, 481, 167, 141, 346),
    "Data-sharing": (298, 49, "never", "never", 86, "never"),
    "Hybrid-FL": ("never", 152, "never", "never", 227, "never"),
    "FedDU": (83, 85, 152, 192, 63, 296),
    "FedDUM": (91, 77, 152, 102, 54, 295),
}
"""Rounds to the targets of FedDUMAP's Tables 10 to 13, CNN, VGG11 and LeNet on CIFAR-10, then on CIFAR-100."""


@pytest.mark.parametrize("method", PUBLISHED_ROUNDS)
def test_published_seconds_of_feddumap_are_rounds_times_a_constant(method):
    """To the second, for 41 figures of methods that neither prune nor distil."""
    own = method in ("FedDU", "FedDUM")
    rounds = iter(PUBLISHED_ROUNDS[method])
    for name in ("feddumap-12", "feddumap-13") if own else ("feddumap-10", "feddumap-11"):
        table = read_table(name).apply_protocol("authors")
        row = next(row for row in table.rows if row.method == method)
        for column in (column for column in table.columns if not column.origin):
            told, clock = find_published(table, column, row), table.make_reading(column, row).clock
            seconds = next(value for metric, value in told.items() if metric.startswith("time_s_to_"))
            wanted = next(rounds)
            assert clock is not None
            if isinstance(wanted, str):
                assert seconds == wanted
            else:
                assert isinstance(seconds, float)
                assert seconds == round(wanted * clock.seconds_per_round) and clock.count_rounds(seconds) == wanted
            figures = {f.metric: f.published for f in make_figures(column, row, told, None, 0.0, Reading(clock=clock))}
            assert wanted in [value for metric, value in figures.items() if metric.startswith("rounds_to_")]


def test_the_constants_of_feddumap():
    table = read_table("feddumap-10").apply_protocol("authors")
    found = [table.make_reading(column, table.rows[0]).clock for column in table.columns]
    assert [round(clock.seconds_per_round, 3) for clock in found if clock] == [3.422, 97.272, 1.868, 1.868]
    c100 = read_table("feddumap-11").apply_protocol("authors")
    found = [c100.make_reading(column, c100.rows[0]).clock for column in c100.columns]
    assert [round(clock.seconds_per_round, 3) for clock in found if clock] == [3.476, 97.695, 1.938, 1.938]


def test_published_seconds_of_feddhad_on_cifar_100_are_rounds_times_a_constant():
    table = read_table("feddhad-3").apply_protocol("authors")
    own = {row.method: row for row in table.rows}
    wanted = {"LeNet": (419, 275, 226, 183), "CNN": (359, 396, 389, 354)}
    for model, rounds in wanted.items():
        column = next(column for column in table.columns if column.name == f"CIFAR-100, {model}")
        found = []
        for method in ("FedAvg", "FedProx", "FedNova", "FedDH"):
            clock = table.make_reading(column, own[method]).clock
            seconds = find_published(table, column, own[method])[f"time_s_to_{0.26 if model == 'LeNet' else 0.41}"]
            assert clock is not None and isinstance(seconds, float)
            found.append(clock.count_rounds(seconds))
        assert tuple(found) == rounds


def test_seconds_of_a_method_that_drops():
    """2 s of training, 1 MiB each way at 1 and 2 MiB a second; half of the operations, a quarter of the bytes."""
    clock = Clock(2.0, params=2**17, macs=1000, devices=2, up=1.0, down=2.0, fixed=False)
    assert clock.seconds_per_round == 3.5
    whole = make_run([0.1, 0.2], macs=1000, bytes_up=2**20)
    half = make_run([0.1, 0.2], macs=500, bytes_up=2**18)
    assert clock.count_seconds(whole) == 7.0
    assert clock.count_seconds(half) == 2 * (1.0 + 1.5 / 4)
    assert replace(clock, fixed=True).count_seconds(half) == 7.0
    assert clock.count_rounds(7.0) is None and replace(clock, fixed=True).count_rounds(7.4) == 2
    assert replace(clock, fixed=True).count_rounds(9.0) is None
    twice = replace(clock, training_factor=6.0, transfer_factor=2.0)
    assert twice.seconds_per_round == 12 + 3


@pytest.mark.parametrize("name", ["feddhad-3", "feddumap-10", "feddumap-11"])
def test_models_of_a_clock_are_those_of_the_zoo(name):
    clock = read_table(name).apply_protocol("authors").protocol.clock
    assert clock is not None
    for key, known in clock.models.items():
        model, data = key.split()
        with torch.device("meta"):
            net = build_model(model, (3, 32, 32), 100 if data == "cifar100" else 10, 0)
        assert sum(net.initial[k].numel() for k in net.trainable) == known["params"]
        assert net.macs_forward == known["macs"]


@pytest.mark.parametrize("count", [2, 3, 4, 16, 17, 30, 100])
def test_an_interval_is_students(count):
    factor = student.ppf(0.975, count - 1)
    assert find_student_factor(count - 1) == pytest.approx(factor, rel=1e-3)
    values = [float(n) for n in range(count)]
    assert compute_interval(values) == pytest.approx(factor * np.std(values, ddof=1) / count**0.5, rel=1e-3)
    assert compute_interval([1.0]) is None


# fair -----------------------------------------------------------------------------------------------------------------
COLUMNS = ("accuracy", "top3", "device_mean", "local_risk", "class_kl")
COLUMNS += ("personal_pooled", "personal_mean", "personal_worst")
curves = st.lists(st.floats(0, 1), min_size=12, max_size=40)


@settings(deadline=None, max_examples=100)
@given(curves, st.integers(0, 5), st.sampled_from([name for name in NAMES if name != "feddhad-2"]))
def test_fair_reads_nothing_but_the_last_evaluations(curve, place, name):
    """However good an earlier round was on test data, no figure knows of it; time to a target is no choice."""
    reading = read_table(name).apply_protocol("fair").protocol.reading
    assert reading.last < 12 - 5
    better = curve[:place] + [2.0] + curve[place + 1 :]
    plain, peak = (make_run(own, **{c: own for c in COLUMNS[1:]}) for own in (curve, better))
    for metric, reader in READERS.items():
        if not reader.has_target and not metric.startswith("acc_pct_within"):
            rest = "" if not metric.endswith("_") else "0.5"
            assert reader.read(plain, rest, reading) == reader.read(peak, rest, reading), metric
    assert measure_metric("best_acc_pct", [peak], reading)[0] is None
    assert measure_metric("best_acc_pct", [peak], Reading(best_round=True))[0] == 200
    assert measure_metric("best_own_tests_pct", [peak], reading)[0] is None
    assert measure_metric("best_own_tests_pct", [peak], Reading(best_round=True))[0] == 200


@pytest.mark.parametrize("name", NAMES)
def test_under_fair_every_table_asks_for_three_seeds_and_no_list(name):
    table = read_table(name).apply_protocol("fair")
    reading = table.protocol.reading
    assert table.protocol.seeds >= 3 and reading.last > 1 and not (reading.maximum or reading.smooth or reading.clock)
    recipes = [
        table.make_recipe(column, row, "full", {})
        for column in table.columns
        for row in table.rows
        if row.find_expression(column)
    ]
    assert all(len(row.list_choices(column)) <= 1 for column in table.columns for row in table.rows)
    base = {"model", "data", "split", "server_data", "metrics", "target", "method", "fleet", "seed"}
    training = ("lr", "lr_decay", "weight_decay", "momentum", "clip", "normalise", "augment", "batch")
    for column in table.columns:
        own = [table.make_recipe(column, r, "full", {}) for r in table.rows if r.find_expression(column)]
        assert len({tuple(getattr(recipe, key) for key in training) for recipe in own}) <= 1, (name, column.name, base)
    assert recipes or name == "feddhad-2"


@pytest.mark.parametrize(
    "section",
    [
        {"maximum": True},
        {"smooth": [39, 3]},
        {"best_round": True},
        {"clock": {}},
        {"run": {"FedAvg": "feddu(decay={1|2})"}},
    ],
)
def test_what_fair_cannot_have(section):
    with pytest.raises(ShoalError) as error:
        build_table("x", keys(fair=section))
    assert error.value.kind.name in ("bad-recipe", "unknown-name")


def test_a_list_outside_of_authors_is_refused():
    with pytest.raises(ShoalError, match="picked by test data"):
        build_table("x", keys(row=[{"method": "A", "run": "fedprox(mu={0.1|1})"}]))
    with pytest.raises(ShoalError, match="picked by test data"):
        build_table("x", keys(fair={"tuned": {"FedAvg": {"A": "fedprox(mu={0.1|1})"}}}))


def test_methods_side_by_side_by_hand():
    """Two seeds; Cheap costs half of FedAvg's bytes and seconds a round, so FedAvg is read after two of four rounds."""
    full = {"FedAvg": [[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.5]], "Cheap": [[0.0, 0.1, 0.2, 0.3]] * 2}
    runs = {
        method: [
            make_run(curve, bytes_up=1_000 if method == "FedAvg" else 0, seconds=2.0 if method == "FedAvg" else 1.0)
            for curve in own
        ]
        for method, own in full.items()
    }
    found = {(f.method, f.metric): f for f in compare_methods("A", "acc", runs, Reading())}
    difference = found["Cheap", MINUS_FEDAVG]
    assert difference.measured == pytest.approx(-0.15) and difference.interval == pytest.approx(12.706 * 0.05)
    assert ("FedAvg", MINUS_FEDAVG) not in found
    assert found["FedAvg", f"{EQUAL}rounds"].measured == pytest.approx(0.45)
    for cost in ("s", "bytes"):
        assert found["FedAvg", f"{EQUAL}{cost}"].measured == pytest.approx(0.25)
        assert found["Cheap", f"{EQUAL}{cost}"].measured == pytest.approx(0.3)
    assert compare_methods("A", "acc", {"FedAvg": runs["FedAvg"]}, Reading()) == []


def test_a_table_under_fair(here):
    sheet = reproduce_table("small.toml", seeds=2)
    assert sheet.table.protocol.name == "fair"
    recipe = (here / "runs/small/a/fedprox/seed-1/recipe.toml").read_text()
    assert "mu=0.5" in recipe and "lr = 0.2" in recipe
    text = sheet.to_markdown()
    assert "Protocol: fair. The other one is authors: --protocol authors." in text
    assert "Tuned on validation data: FedProx." in text and "Not tuned: FedAvg." in text
    assert INTERVAL in text and EQUAL_COST in text and "## A, at equal cost" in text
    assert "minus FedAvg | equal rounds | equal s | equal bytes" in text
    figure = next(f for f in sheet.figures if (f.method, f.metric) == ("FedAvg", "acc"))
    lines = [json.loads(line) for line in (here / "runs/small/a/fedavg/seed-0/history.jsonl").read_text().splitlines()]
    other = [json.loads(line) for line in (here / "runs/small/a/fedavg/seed-1/history.jsonl").read_text().splitlines()]
    ends = [np.mean([row["accuracy"] for row in own]) for own in (lines, other)]
    assert figure.measured == pytest.approx(np.mean(ends)) and figure.interval is not None


# authors --------------------------------------------------------------------------------------------------------------
def test_a_table_under_authors(here):
    sheet = reproduce_table("small.toml", protocol="authors")
    assert sheet.seeds == 1 and sheet.to_dict()["protocol"] == "authors"
    by = {(f.method, f.metric): f for f in sheet.figures}
    each = []
    for choice, mu in enumerate(("0.1", "1.0")):
        folder = here / f"runs/small-authors/a/fedprox/choice-{choice}/seed-0"
        assert f"mu={mu}" in (folder / "recipe.toml").read_text() and "lr = 0.3" in (folder / "recipe.toml").read_text()
        rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        each.append(max(row["accuracy"] for row in rows))
    assert by["FedProx", "acc"].measured == pytest.approx(max(each))
    assert by["FedProx", MEAN_OF_LIST].measured == pytest.approx(np.mean(each))
    assert "the best of 2 by test accuracy: fedprox(mu=" in by["FedProx", "acc"].note
    per_round = 2.0 + 4 * 2 * 100_000 / 2**20 * (1 / 6.25 + 1 / 12.5)
    rounds = by["FedAvg", "rounds_to_0.01"].measured
    assert isinstance(rounds, float) and by["FedAvg", "time_s_to_0.01"].measured == pytest.approx(per_round * rounds)
    assert by["FedProx", "rounds_to_0.01"].published == round(100 / per_round)
    text = sheet.to_markdown()
    assert "Protocol: authors. The other one is fair: --protocol fair." in text and CHOSEN in text
    assert "A, FedProx: the best of 2 by test accuracy: fedprox(mu=" in text
    assert "picked by test data" in text and "- as their code has it" in text and "## A, to the target" in text
    again = reproduce_table("small.toml", protocol="authors")
    assert again.figures == sheet.figures


def test_a_table_without_authors_says_so(monkeypatch, capsys, here):
    monkeypatch.setattr(sys, "argv", ["shoal", "reproduce", "fedbr-2", "--protocol", "authors"])
    with pytest.raises(SystemExit):
        run_command_line()
    assert "fedbr-2 has no protocol of its authors" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ShoalError, match="no protocol called 'unfair'"):
        reproduce_table("small.toml", protocol="unfair")
    assert not (here / "runs").exists()


def test_the_command_names_both(monkeypatch, capsys):
    for protocol in ("fair", "authors"):
        words = ["small.toml", "--protocol", protocol, "--seeds", "1", "--scale", "smoke"]
        monkeypatch.setattr(sys, "argv", ["shoal", "reproduce", *words])
        with pytest.raises(SystemExit) as end:
            run_command_line()
        out = capsys.readouterr().out
        assert not end.value.code
        assert f"Protocol: {protocol}." in out and "--protocol" in out


def test_variants_are_further_columns_with_the_expressions_of_the_first():
    table = read_table("feddhad-3").apply_protocol("authors")
    names = [column.name for column in table.columns]
    assert "CIFAR-10, LeNet, lenet-relu-logits" in names and len(names) == 6
    variant = next(column for column in table.columns if column.name.endswith("relu-logits"))
    row = next(row for row in table.rows if row.method == "FedDH")
    assert len(row.list_choices(variant)) == 16
    recipe = table.make_recipe(variant, row, "full", {}, 5)
    assert recipe.model == "lenet-relu-logits" and recipe.method.startswith("feddh_released(lr_v=0.001, ")
    keys_ = (recipe.augment, recipe.normalise, recipe.weight_decay, recipe.momentum, recipe.clip, recipe.eval_every)
    assert keys_ == ("flip,crop:4", False, 0.0, 0.0, 0.0, 1)
    fair = read_table("feddhad-3").apply_protocol("fair")
    recipe = fair.make_recipe(fair.columns[0], fair.rows[1], "full", {})
    assert (recipe.augment, recipe.weight_decay, recipe.clip) == ("flip,crop:4", 0.001, 1.0)


@pytest.mark.parametrize("name", WITH_AUTHORS)
def test_every_cell_under_authors_has_a_recipe_and_every_list_its_length(name):
    table = read_table(name).apply_protocol("authors")
    lengths = {"FedDU": 4, "FedAP": 4, "IMC": 4, "FedDUAP": 8, "FedDH": 16, "FedDHAD": 16}
    lengths |= {"FedProx": 4} if name == "niid-bench" else {}
    for column in table.columns:
        for row in table.rows:
            choices = row.list_choices(column)
            for number, _ in enumerate(choices):
                table.make_recipe(column, row, "full", {}, number)
            assert len(choices) in (0, lengths.get(row.method, 1)), (column.name, row.method)


@pytest.mark.parametrize("paper, numbers", [("feddumap", range(2, 14))])
@pytest.mark.parametrize("protocol", ["fair", "authors"])
def test_tables_of_a_paper_share_their_runs_under_both(paper, numbers, protocol):
    found: dict[tuple[str, str], list[str]] = {}
    for number in numbers:
        table = read_table(f"{paper}-{number}").apply_protocol(protocol)
        for column in table.columns:
            for row in table.rows:
                choices = range(len(row.list_choices(column)))
                prints = [table.make_recipe(column, row, "full", {}, n).fingerprint() for n in choices]
                if prints:
                    assert found.setdefault((column.folder, row.folder), prints) == prints


def test_a_table_of_authors_runs_without_data():
    sheet = reproduce_table("niid-bench", "smoke", only=["FedAvg"], protocol="authors")
    assert {f.method for f in sheet.figures} == {"FedAvg"} and all(f.measured is not None for f in sheet.figures)
    sheet = reproduce_table("feddhad-6", "smoke", only=["FedAD"], protocol="authors")
    assert [f.measured for f in sheet.figures if f.metric == "acc"] != [None, None]


@pytest.mark.whole
@pytest.mark.parametrize("name", WITH_AUTHORS)
def test_every_table_of_authors_runs_without_data(name):
    sheet = reproduce_table(name, "smoke", protocol="authors")
    for figure in (f for f in sheet.figures if f.metric == "acc"):
        missing = next(row.missing for row in sheet.table.rows if row.method == figure.method)
        assert (figure.measured is None) == bool(missing)


# files ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, wanted",
    [
        ("fedavg", ("fedavg",)),
        ("fedap(at={10|30})", ("fedap(at=10)", "fedap(at=30)")),
        ("a({1|2})+b({3|4})", ("a(1)+b(3)", "a(1)+b(4)", "a(2)+b(3)", "a(2)+b(4)")),
    ],
)
def test_a_list_by_hand(text, wanted):
    assert expand_choices(text) == wanted


def test_a_list_that_is_too_long():
    with pytest.raises(ShoalError, match="list of 1000 methods"):
        expand_choices("a" + "{0|1|2|3|4|5|6|7|8|9}" * 3)


@pytest.mark.parametrize(
    "found, words",
    [
        (keys(fair=5), "a table [fair]"),
        (keys(authors=5), "a table [authors]"),
        (keys(authors="nowhere"), "no shared protocol called 'nowhere'"),
        (keys(authors="../feddhad"), "no shared protocol"),
        (keys(fair={"seeds": 0}), "1 to 1000"),
        (keys(fair={"last": True}), "evaluations"),
        (keys(fair={"set": {"roundz": 1}}), "Did you mean 'rounds'?"),
        (keys(fair={"tuned": {"FedProxx": "fedprox"}}), "no row for a protocol called"),
        (keys(fair={"tuned": {"FedAvg": {"B": "fedavg"}}}), "no column for the row FedAvg called 'B'"),
        (keys(authors={"smooth": [38, 3]}), "an odd window"),
        (keys(authors={"smooth": [3, 3]}), "an odd window"),
        (keys(authors={"maximum": 1}), "true or false"),
        (keys(authors={"run": {"FedAvg": 5}}), "method expressions"),
        (keys(authors={"variants": {"lenet": "x"}}), "lists of models"),
        (keys(authors={"clock": {"up": 1.0}}), "`down` of [authors.clock] is not given"),
        (
            keys(authors={"clock": {"up": 1, "down": 1, "devices": 1, "models": {"m d": {"training": 1}}}}),
            "training, params and macs",
        ),
    ],
)
def test_a_protocol_that_cannot_be_used(found, words):
    with pytest.raises(ShoalError) as error:
        build_table("x", found)
    assert words in str(error.value) and error.value.kind.name in ("bad-recipe", "unknown-name")
