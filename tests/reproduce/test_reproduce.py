"""Tables of papers: their files, the figures beside each other, and runs that go on where they were stopped."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import choose_few
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal import History, Recipe, ShoalError
from shoal.cli.commands import run_command_line
from shoal.core.measures.divergence import jensen_shannon_divergence
from shoal.data.dataset import DATASETS
from shoal.data.server_data import draw_server_samples, draw_withheld_samples
from shoal.reproduce.figures import (
    Figure,
    find_published,
    make_figures,
    make_figures_of_list,
    measure_metric,
    read_published,
)
from shoal.reproduce.ledger import LEFT_OUT
from shoal.reproduce.metric_readers import NEVER, parse_published_value, parse_size
from shoal.reproduce.reading import PLAIN, Reading
from shoal.reproduce.run import Cell, make_cell_figures, reproduce_table
from shoal.reproduce.sheet import (
    MEANINGLESS,
    PUBLISHED_SPREAD,
    SECONDS,
    SIMULATED,
    SIZES,
    Sheet,
    count_shown_cells,
    format_figure,
    format_head,
    format_value,
)
from shoal.reproduce.table_file import SHIPPED, build_table, list_tables, read_table
from shoal.runs.build import assemble_run

NAMES = sorted(file.stem for file in SHIPPED.glob("*.toml"))
ROUNDS = {"FedDHAD": (500,), "FedBIAD": (60,), "FedACD": (200,), "FedDUMAP": (500,), "FedBR": (200,)}
ROUNDS |= {"NIID-Bench": (50, 500), "PFLlib": (200,)}
LOST = ("FedACD", "NIID-Bench")
"""Papers of which some cells could not be read, or have no figure."""
FILE = """
paper = "FedDHAD"
table = "3"
title = "a small one"
notes = ["said once"]
[base]
data = "digits"
devices = 4
sample = 2
rounds = 3
steps = "1"
batch = 8
engine = "serial"
[fair]
seeds = 1
last = 1
[[column]]
name = "LeNet on C10"
set = { target = 0.54, split = "iid" }
where = { dataset = "cifar10", model = "lenet5" }
[[column]]
name = "Bare"
[[row]]
method = "FedAvg"
run = "fedavg"
[[row]]
method = "FedProx"
run = { "LeNet on C10" = "fedprox(mu=0.1)" }
[[row]]
method = "MOON"
missing = "not there."
"""


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path


def keys(**changes: Any) -> dict[str, Any]:
    """The least that is a table."""
    return {"column": [{"name": "A"}], "row": [{"method": "FedAvg", "run": "fedavg"}]} | changes


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shoal", "reproduce", *words])
    try:
        run_command_line()
    except SystemExit as end:
        return int(end.code or 0), *capsys.readouterr()
    return 0, *capsys.readouterr()


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in rows]


# the shipped tables ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_table_has_the_rows_of_the_paper(name):
    table = read_table(name)
    wanted = {
        line["method"] for line in read_published() if (line["paper"], line["table"]) == (table.paper, table.table)
    }
    assert wanted <= {row.method for row in table.rows}
    for column in table.columns:
        for row in table.rows:
            if column.where and table.paper not in LOST and (row.missing or row.find_expression(column)):
                told = find_published(table, column, row)
                assert told and None not in told.values(), (column.name, row.method)
            if row.find_expression(column):
                assert table.make_recipe(column, row, "full", {}).rounds in ROUNDS[table.paper]


def list_runs(name: str) -> list[Recipe]:
    """The runs of a shipped table in its smallest size."""
    table = read_table(name)
    cells = [(column, row) for column in table.columns for row in table.rows if row.find_expression(column)]
    return [table.make_recipe(column, row, "smoke", {}) for column, row in cells]


FEW = choose_few((name, {read_table(name).paper}, max(1, len(list_runs(name)))) for name in NAMES)
"""A table of every paper, those with the fewest runs; laws show that parts, models and splits of the others train."""
WHOLE = [pytest.param(name, marks=pytest.mark.whole) for name in NAMES if name not in FEW]


@pytest.mark.parametrize("name", [*FEW, *WHOLE])
def test_a_shipped_table_runs_without_data(name):
    sheet = reproduce_table(name, "smoke")
    assert sheet.remarks[0] == MEANINGLESS
    for figure in (f for f in sheet.figures if not f.metric.startswith("best_")):  # picks a round: not under fair
        missing = next(row.missing for row in sheet.table.rows if row.method == figure.method)
        assert (figure.measured is None) == bool(missing) and figure.seeds == (0 if missing else 1)


def test_the_published_figures_of_a_cell():
    table = read_table("feddhad-3")
    by = {column.name: column for column in table.columns}
    row = next(row for row in table.rows if row.method == "FedDyn")
    found = find_published(table, by["CIFAR-10, CNN"], row)
    assert found == {"acc": 0.700, "time_s_to_0.72": NEVER, "mflops": 4.549}


def test_the_hyper_parameters_of_table_5():
    """Two cells read off the paper by hand, with all figures of both rows."""
    table = read_table("feddhad-3")
    c100, lenet = table.columns[3], table.columns[0]
    own = {row.method: row for row in table.rows}
    rates = "feddh(lr_v=0.001, decay_v=0.9999, lr_b=0.0001, decay_b=0.99)"
    assert (c100.name, own["FedDH"].find_expression(c100)) == ("CIFAR-100, CNN", rates)
    both = "feddh(lr_v=0.01, decay_v=0.9999, lr_b=0.0001, decay_b=0.99)+fedad"
    assert (lenet.name, own["FedDHAD"].find_expression(lenet)) == ("CIFAR-10, LeNet", both)


def test_the_published_figures_of_fedbiad():
    table = read_table("fedbiad-1")
    own = {row.method: row for row in table.rows}
    found = find_published(table, table.columns[2], own["FedBIAD"])
    assert found == {"top3_acc_pct": 29.85, "top3_acc_pct_std": 0.15, "upload_size": 16_400_000.0}
    assert find_published(table, table.columns[0], own["AFD"])["upload_size"] == 424_000.0


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("fedacd")])
def test_every_figure_of_fedacd_has_a_cell(name):
    table = read_table(name)
    rows_ = [replace(row, published={}) for row in table.rows if not row.table]
    told = [find_published(table, column, row) for column in table.columns for row in rows_]
    shown_ = [metric for cell in told for metric, value in cell.items() if value is not None]
    own = [line["metric"] for line in read_published() if (line["paper"], line["table"]) == ("FedACD", table.table)]
    assert sorted(shown_) == sorted(own)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("feddumap")])
def test_every_figure_of_feddumap_has_a_cell(name):
    table = read_table(name)
    run = [
        (column, row) for column in table.columns for row in table.rows if not row.table and row.find_expression(column)
    ]
    shown_ = [value for column, row in run for value in find_published(table, column, row).values()]
    lines_ = [line for line in read_published() if (line["paper"], line["table"]) == ("FedDUMAP", table.table)]
    assert sorted(shown_, key=str) == sorted((parse_published_value(line["value"]) for line in lines_), key=str)


def test_the_server_data_of_feddumap():
    """400, 2,000 or 4,000 of 10,000 samples that no device has, and labels of the degrees that Table 5 names."""
    for name in (name for name in NAMES if name.startswith("feddumap")):
        table = read_table(name)
        for column in table.columns:
            recipe = table.make_recipe(column, table.rows[-1], "full", {})
            classes = 100 if recipe.data == "cifar100" else 10
            labels = np.arange(50_000) % classes
            own, gone = (
                f(recipe.server_data, labels, np.random.default_rng(0))
                for f in (draw_server_samples, draw_withheld_samples)
            )
            assert len(own) in (400, 2000, 4000) and len(gone) == 10_000 and set(own) <= set(gone)
            shares = [np.bincount(labels[rows]) / len(rows) for rows in (own, np.delete(np.arange(50_000), gone))]
            shares[0] = np.pad(shares[0], (0, classes - len(shares[0])))
            wanted = {"d 0.61": 0.61, "d 9e-6": 0.0}.get(column.name.rpartition(", ")[2], 0.31)
            assert float(jensen_shannon_divergence(*shares)) == pytest.approx(wanted, abs=0.01 if wanted else 1e-4)


@pytest.mark.parametrize("paper, numbers", [("fedacd", (1, 2, 3, 5, 8, 9)), ("feddumap", range(2, 14))])
def test_tables_of_a_paper_can_share_their_runs(paper, numbers):
    """What lies in one folder is one recipe, so with one --out a cell is run once."""
    found: dict[tuple[str, str], str] = {}
    for number in numbers:
        table = read_table(f"{paper}-{number}")
        for column in table.columns:
            for row in (row for row in table.rows if row.find_expression(column)):
                recipe = table.make_recipe(column, row, "full", {})
                assert found.setdefault((column.folder, row.folder), recipe.fingerprint()) == recipe.fingerprint()


def test_recipes_holds_files_of_its_own_and_no_copy_of_a_shipped_table():
    """A copy there would be found before the shipped table of its name, and links break on some systems."""
    examples = list((Path(__file__).parents[2] / "recipes").iterdir())
    assert not [file.name for file in examples if file.is_symlink()]
    assert not {file.stem for file in examples} & set(NAMES)


# noise ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data, shape, classes", [("cifar10", (3, 32, 32), 10), ("cifar100", (3, 32, 32), 100)])
def test_smoke_keeps_shape_and_classes(data, shape, classes):
    keys_ = keys(base={"data": data, "model": "lenet", "batch": 5})
    table = build_table("x", keys_)
    recipe = table.make_recipe(table.columns[0], table.rows[0], "smoke", {})
    assert (recipe.data, recipe.model, recipe.batch, recipe.rounds) == (f"noise-{data}", "lenet", 5, 2)
    net = assemble_run(recipe).net
    assert (net.input_shape, net.classes) == (shape, classes)


@pytest.mark.parametrize("data", ["ptb", "wikitext-2"])
def test_noise_in_the_form_of_a_text(data):
    noise = DATASETS[f"noise-{data}"]()
    assert noise.inputs.shape == noise.targets.shape and noise.inputs.dtype == noise.targets.dtype == torch.int64
    assert torch.equal(noise.inputs[:, 1:], noise.targets[:, :-1])
    assert int(noise.test_targets.max()) < noise.classes


def test_smoke_has_no_setting_that_a_user_would_be_warned_of(caplog):
    reproduce_table("niid-bench", "smoke", only=["FedAvg"], columns=["CIFAR-10, IID"])
    assert "epochs" not in caplog.text


def test_smoke_leaves_data_that_is_there_alone_and_names_what_has_no_stand_in():
    table = build_table("x", keys(base={"data": "digits"}, smoke={"rounds": 1}))
    recipe = table.make_recipe(table.columns[0], table.rows[0], "smoke", {"sample": 2})
    assert (recipe.data, recipe.rounds, recipe.devices, recipe.sample) == ("digits", 1, 6, 2)
    table = build_table("x", keys(base={"data": "shakespeare"}))
    with pytest.raises(ShoalError, match="stand in for shakespeare"):
        table.make_recipe(table.columns[0], table.rows[0], "smoke", {})


# figures --------------------------------------------------------------------------------------------------------------
def history(*accuracies: float | None, macs: int = 2_000_000) -> History:
    costs = {"bytes_down": 1, "bytes_up": 1, "macs_work": 1, "sim_seconds": 0.5, "wall_seconds": 1.0}
    return History([{"round": n, "accuracy": a, "macs_forward": macs, **costs} for n, a in enumerate(accuracies)])


def test_figures_by_hand():
    runs = [history(None, 0.5, 0.6), history(None, 0.3, 0.4, macs=1_000_000)]
    assert measure_metric("acc", runs) == (pytest.approx(0.5), pytest.approx(0.02**0.5), 2)
    assert measure_metric("time_s_to_0.5", runs) == (1.0, None, 1)  # one seed of two, after two rounds of half a second
    assert measure_metric("time_s_to_0.9", runs) == (NEVER, None, 0)
    assert measure_metric("mflops", runs) == (1.5, pytest.approx(0.5**0.5), 2)
    assert measure_metric("server_overhead_fraction", runs) == (None, None, 0)
    assert measure_metric("time_s_to_nowhere", runs) == (NEVER, None, 0)


def test_a_line_by_hand():
    figure = Figure("A", "M", "time_s_to_0.5", 3.0, 1.0, None, seeds=2, reached=1)
    assert format_figure(figure) == ["1.000 (1/2)", "3.000", "-2.000"]
    assert format_figure(Figure("A", "M", "acc", None, 0.5, 0.25, 2, 2)) == ["0.500 ± 0.250", "-", "-"]
    assert format_figure(None) == ["-", "-", "-"]
    assert [count_shown_cells(m, told) for m in ("acc", "time_s_to_0.5") for told in (True, False)] == [3, 1, 2, 1]


def text_run(*shares: float, enrol: int = 0) -> History:
    """A run of two devices a round that send 1,000 bytes each; the shares are of the three likeliest words."""
    costs = {"bytes_down": 1, "macs_work": 1, "sim_seconds": 0.5, "wall_seconds": 1.0, "macs_forward": 10**6}
    by = {"seconds_by": {"down": 0.1, "compute": 0.25, "up": 0.15}, "devices": [3, 5]}
    told = [enrol] + [0] * (len(shares) - 1)
    return History(
        [
            {"round": n, "accuracy": share / 2, "top3": share, "bytes_up": 2000 + extra, **costs, **by}
            | {"bytes_by": {"up": {"delta": 2000, "enrol": extra}}}
            for n, (share, extra) in enumerate(zip(shares, told, strict=True))
        ]
    )


def test_figures_of_a_language_model_by_hand():
    runs = [text_run(0.2, 0.3, enrol=800), text_run(0.2, 0.2)]
    assert measure_metric("top3_acc_pct", runs) == (pytest.approx(25), pytest.approx(50**0.5), 2)
    assert measure_metric("top3_acc_pct_std", runs) == (pytest.approx(50**0.5), None, 2)
    assert measure_metric("top3_acc_pct_std", runs[:1])[0] is None
    assert measure_metric("top1_acc_pct", runs)[0] == pytest.approx(12.5)
    assert measure_metric("upload_size", runs) == (1000.0, 0.0, 2)  # what a device tells once is no part
    assert measure_metric("time_s_to_top3_0.25", runs) == (1.0, None, 1)
    assert measure_metric("rounds_to_top3_0.25", runs) == (2.0, None, 1)
    assert measure_metric("rounds_to_0.25", runs) == measure_metric("rounds_to_per_class_0.1", runs) == (NEVER, None, 0)
    assert measure_metric("time_s_local", runs) == (0.25, 0.0, 2)


def test_upload_of_a_run_whose_history_does_not_list_devices():
    """A ledger leaves them out; so many are then taken to answer as a round asks."""
    kept = [{k: v for k, v in row.items() if k not in LEFT_OUT} for row in text_run(0.2, 0.3).rows]
    assert measure_metric("upload_size", [History(kept)], Reading(asked=4)) == (500.0, None, 1)
    assert measure_metric("upload_size", [History(kept)]) == (None, None, 0)
    table = read_table("fedbiad-1").apply_protocol("fair")
    column, row = table.columns[0], table.rows[0]
    recipe = table.make_recipe(column, row, "full", {})
    figures = make_cell_figures(table, column, row, Cell(column, row, (recipe,)), [History(kept)])
    assert {f.metric: f.measured for f in figures}["upload_size"] == 2000 / recipe.sample


def test_accuracy_and_target_are_of_the_three_likeliest_where_a_run_looked_at_them():
    table = read_table("fedbiad-1")
    wiki, avg = table.columns[3], table.rows[0]
    told = find_published(table, wiki, avg)
    own = {f.metric: f for f in make_figures(wiki, avg, told, [text_run(0.2, 0.32)], 0.31)}
    assert {*own} == {"top3_acc_pct", "time_s_to_top3_0.31", "upload_size"}
    assert own["top3_acc_pct"].gap == pytest.approx(32 - 31.86)
    both = make_figures(wiki, avg, told, [text_run(0.3), text_run(0.32)], 0.31)
    sheet = Sheet(table, "full", 2, tuple(both))
    (_, heads, lines), *_ = sheet.make_sections()
    assert heads == "method|top-3 %|paper|gap|s to 0.31|upload|paper|gap".split("|")
    assert lines[0][1:4] == ["31.00 ± 12.71", "31.86 ± 0.05", "-0.86"]
    assert SIZES in sheet.remarks and SIMULATED in sheet.remarks and SECONDS not in sheet.remarks
    assert PUBLISHED_SPREAD in sheet.remarks  # 0.05 is no interval
    plain = replace(sheet, figures=tuple(f for f in both if not f.metric.endswith("_std")))
    assert PUBLISHED_SPREAD not in plain.remarks


def judged_run(share: float) -> History:
    """A run that looked at more than the test set."""
    rows_ = history(share).rows
    return History([rows_[0] | {"device_mean": share / 2, "local_risk": 1 - share, "class_kl": 10 * share}])


def test_figures_of_local_models_by_hand():
    runs = [judged_run(0.4), judged_run(0.5)]
    assert measure_metric("acc_uniform_test_pct", runs) == (pytest.approx(45), pytest.approx(50**0.5), 2)
    assert measure_metric("acc_client_tests_pct", runs)[0] == pytest.approx(22.5)
    assert measure_metric("local_model_risk", runs)[0] == pytest.approx(0.55)
    assert measure_metric("KL_P_Q", runs)[0] == pytest.approx(4.5)
    assert measure_metric("KL_P_Q", [history(0.4)]) == (None, None, 0)
    assert [format_head(m) for m in ("acc_uniform_test_pct", "local_model_risk")] == ["accuracy %", "local risk"]
    assert format_figure(Figure("A", "M", "KL_P_Q", 0.83, 4.5, 0.25, 2, 2)) == ["4.50 ± 0.25", "0.83", "+3.67"]


def test_the_best_of_a_list_is_never_that_with_the_largest_error():
    """Where a paper has nothing but a risk, the setting is chosen by the accuracy all the same."""
    table = read_table("fedacd-3")
    column, row = table.columns[0], replace(table.rows[0], run="fedprox(mu={0.1|1})")
    told = {"local_model_risk": 0.3}
    groups = [[judged_run(0.4)], [judged_run(0.5)]]  # risks of 0.6 and 0.5
    figures = {f.metric: f for f in make_figures_of_list(column, row, told, groups, 0.3, PLAIN)}
    assert figures["local_model_risk"].measured == 0.5 and "fedprox(mu=1)" in figures["local_model_risk"].note
    assert figures["mean_of_list"].measured == pytest.approx(0.45)


def test_what_devices_get_on_their_own_tests_stands_first_in_a_table_that_is_about_it():
    """The best of two rounds over all samples is 0.8; the last has 0.6, a mean of 0.5 and a worst tenth of 0.1."""
    own = {"personal_pooled": 0.8, "personal_mean": 0.7, "personal_worst": 0.3}
    later = {"personal_pooled": 0.6, "personal_mean": 0.5, "personal_worst": 0.1}
    run = History([history(0.3).rows[0] | own, history(0.4).rows[0] | later])
    table = read_table("pfllib").apply_protocol("authors")
    column, row = table.columns[0], next(row for row in table.rows if row.method == "FedALA")
    told = find_published(table, column, row)
    found = {f.metric: f for f in make_figures(column, row, told, [run], 0.0, table.protocol.reading)}
    assert list(found)[:4] == ["own_tests_pct", "own_tests_mean_pct", "own_tests_worst_pct", "acc_pct"]
    assert [found[name].measured for name in list(found)[:4]] == pytest.approx([60, 50, 10, 40])
    assert found["best_own_tests_pct"].measured == pytest.approx(80)
    assert found["best_own_tests_pct"].published == 99.57
    heads = {name: heads for name, heads, _ in Sheet(table, "full", 1, tuple(found.values())).make_sections()}
    assert list(heads) == [column.name, f"{column.name}, on devices' own tests"]
    assert heads[f"{column.name}, on devices' own tests"] == [
        "method", "own tests %", "mean of devices %", "worst tenth %", "best round of own tests %", "paper", "gap"
    ]  # fmt: skip
    beside = make_figures(column, row, {"acc": 0.7}, [run])
    assert [f.metric for f in beside][:2] == ["acc", "own_tests_pct"]


def test_a_figure_that_was_lost_is_measured_all_the_same():
    table = read_table("fedacd-1")
    column, own = table.columns[4], {row.method: row for row in table.rows}
    assert find_published(table, column, own["FedAvg"]) == {
        "acc_uniform_test_pct": 39.57,
        "acc_uniform_test_pct_std": 0.6,
    }
    lost = find_published(table, column, own["FedProx"])
    assert lost == {"acc_uniform_test_pct": None, "acc_uniform_test_pct_std": None}
    (figure,) = make_figures(column, own["FedProx"], lost, [judged_run(0.4)])
    assert format_figure(figure) == ["40.00", "-", "-"] and figure.metric == "acc_uniform_test_pct"
    assert make_figures(column, own["FedProx"], lost) == []
    aimed = make_figures(column, own["FedProx"], lost, [judged_run(0.4)], 0.3)
    assert [f.metric for f in aimed] == ["acc_uniform_test_pct", "time_s_to_0.3"]


def test_sizes_are_shown_in_one_unit():
    assert format_figure(Figure("A", "M", "upload_size", 1.1e6, 998_000.0)) == ["1.00 MB", "1.10 MB", "-9.3 %"]
    assert format_figure(Figure("A", "M", "upload_size", 424e3, 422_344.0)) == ["422 KB", "424 KB", "-0.4 %"]
    assert format_figure(Figure("A", "M", "upload_size", None, 29_819_200.0)) == ["29.8 MB", "-", "-"]
    assert format_figure(Figure("A", "M", "upload_size", None, 12.0))[0] == "12 B"
    assert format_figure(Figure("A", "M", "upload_size", 0.0, 12.0))[2] == "-"
    assert format_figure(Figure("A", "M", "upload_size", 530_000.0, 529_992.0))[2] == "+0.0 %"
    assert format_head("time_s_to_top3_0.31") == "s to 0.31" and format_head("KL_{P}") == "KL_{P}"


def test_a_gap_is_measured_minus_published():
    table = read_table("small.toml")
    column, row = table.columns[0], table.rows[0]
    by = {f.metric: f for f in make_figures(column, row, find_published(table, column, row), [history(0.6)], 0.54)}
    assert by["acc"].gap == pytest.approx(0.6 - 0.565)
    assert by["time_s_to_0.54"].gap == 0.5 - 2366
    assert by["mflops"].gap == pytest.approx(2 - 0.652)
    never = make_figures(column, row, {"time_s_to_0.54": 3.0}, [history(0.1)])
    assert {f.metric: (f.measured, f.gap) for f in never}["time_s_to_0.54"] == (NEVER, None)


@pytest.mark.parametrize("text, value", [("0.5", 0.5), ("NaN", NEVER), ("531KB", "531KB"), ("inf", "inf")])
def test_a_published_value(text, value):
    assert parse_published_value(text) == value


@pytest.mark.parametrize("text, value", [("531KB", 531e3), ("29.8MB", 29.8e6), ("7 B", 7.0), ("large", "large")])
def test_a_published_size(text, value):
    assert parse_size(text) == value


def test_numbers_as_they_are_shown():
    assert [format_value(v, "acc", "+") for v in (-0.0001, 0.12345, None, NEVER)] == ["+0.000", "+0.123", "-", NEVER]
    assert (format_value(1371.4, "time_s_to_0.54"), format_value(2.5, "time_s_to_0.54")) == ("1371", "2.500")


# running --------------------------------------------------------------------------------------------------------------
def test_a_table_side_by_side(here):
    sheet = reproduce_table("small.toml", seeds=2)
    found = {(f.column, f.method, f.metric): f for f in sheet.figures}
    avg = found["LeNet on C10", "FedAvg", "acc"]
    ends = [lines(here / f"runs/small/lenet-on-c10/fedavg/seed-{s}")[-1]["accuracy"] for s in (0, 1)]
    assert (avg.measured, avg.published, avg.seeds) == (sum(ends) / 2, 0.565, 2)
    assert found["LeNet on C10", "MOON", "acc"].published == 0.610
    assert found["LeNet on C10", "MOON", "acc"].measured is None
    assert ("Bare", "FedAvg", "time_s_to_0.54") not in found
    assert ("Bare", "FedProx", "acc") not in found and ("Bare", "MOON", "acc") not in found
    assert found["Bare", "FedAvg", "acc"].published is None


def test_what_is_written(here):
    sheet = reproduce_table("small.toml", out="o")
    text = (here / "o/table.md").read_text()
    assert "| method | accuracy | M MACs |" in text and SIMULATED not in text
    assert "# FedDHAD, Table 3: a small one" in text and "## LeNet on C10" in text and "- said once" in text
    assert f"- {SECONDS}" in text and "- MOON was not run: not there." in text and MEANINGLESS not in text
    assert json.loads((here / "o/table.json").read_text()) == sheet.to_dict()
    rows = list(csv.DictReader((here / "o/table.csv").open()))
    assert len(rows) == len(sheet.figures) and rows[0]["gap"] == repr(sheet.figures[0].gap)


def test_finished_cells_are_only_read():
    played: list[str] = []
    first = reproduce_table("small.toml", watch=lambda recipe, row, history: played.append(recipe.method))
    assert len(played) == 9
    again = reproduce_table("small.toml", watch=lambda recipe, row, history: played.append(recipe.method))
    assert len(played) == 9 and again == first


def test_a_stop_is_gone_on_from(here):
    def stop(recipe, row, history):
        if recipe.method.startswith("fedprox") and len(history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(ShoalError, match="same command goes on") as error:
        reproduce_table("small.toml", out="o", watch=stop)
    assert error.value.kind.name == "interrupted"
    assert len(lines(here / "o/lenet-on-c10/fedprox/seed-0")) == 2
    assert reproduce_table("small.toml", out="o").figures == reproduce_table("small.toml", out="whole").figures
    for run in ("lenet-on-c10/fedprox/seed-0", "bare/fedavg/seed-0"):
        assert lines(here / "o" / run) == lines(here / "whole" / run)


@pytest.mark.parametrize("rounds", [2, 3])
def test_what_a_power_cut_leaves_of_a_history_is_gone_on_from(here, rounds):
    """In the middle of a run the tail is torn; of one that is over, rows may be missing on a disk that lied."""

    def stop(recipe, row, history):
        if recipe.method.startswith("fedprox") and len(history) == rounds:
            raise KeyboardInterrupt

    with pytest.raises(ShoalError, match="same command goes on"):
        reproduce_table("small.toml", out="o", watch=stop)
    file = here / "o/lenet-on-c10/fedprox/seed-0/history.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(300) + b"\n{" if rounds == 2 else whole.splitlines(keepends=True)[0])
    assert reproduce_table("small.toml", out="o").figures == reproduce_table("small.toml", out="whole").figures
    assert len(lines(file.parent)) == 3


def test_only_some_methods_and_what_was_there_before():
    first = reproduce_table("small.toml", only=["fedPROX"])
    assert {f.method for f in first.figures} == {"FedProx"}
    second = reproduce_table("small.toml", only=["FedAvg,moon"])
    assert {f.method for f in second.figures} == {"FedAvg", "FedProx", "MOON"}
    assert second.figures == reproduce_table("small.toml").figures


def test_more_rounds_go_on(here):
    reproduce_table("small.toml", only=["FedAvg"])
    reproduce_table("small.toml", only=["FedAvg"], changes={"rounds": 5})
    assert len(lines(here / "runs/small/bare/fedavg/seed-0")) == 5


def test_runs_of_another_recipe_are_not_mixed_in():
    reproduce_table("small.toml", only=["FedAvg"])
    with pytest.raises(ShoalError, match="was run with lr = 0.1, not 0.05") as error:
        reproduce_table("small.toml", changes={"lr": 0.05})
    assert error.value.kind.name == "other-recipe"


def test_a_folder_of_something_else_is_left_alone(here):
    (here / "o").mkdir()
    (here / "o/thesis.tex").write_text("precious")
    with pytest.raises(ShoalError) as error:
        reproduce_table("small.toml", out="o")
    assert error.value.kind.name == "folder-exists" and len(list((here / "o").iterdir())) == 1


@pytest.mark.parametrize(
    "more, kind, words",
    [
        ({"only": ["FedAvgg"]}, "unknown-name", "Its methods are: FedAvg, FedProx, MOON."),
        ({"scale": "big"}, "unknown-name", "full, smoke"),
        ({"seeds": 0}, "bad-value", "1 to 1000"),
        ({"changes": {"method": "fedavg"}}, "bad-value", "row"),
        ({"changes": {"out": "x"}}, "bad-value", "--out"),
        ({"changes": {"roundz": 1}}, "unknown-name", "rounds"),
        ({"changes": {"sample": 9}}, "bad-value", "devices"),
    ],
)
def test_what_cannot_be_asked_for(here, more, kind, words):
    with pytest.raises(ShoalError) as error:
        reproduce_table("small.toml", **more)
    assert error.value.kind.name == kind and words in str(error.value)
    assert not (here / "runs").exists()


def test_a_method_that_is_not_there_is_told_before_anything_runs(here):
    (here / "small.toml").write_text(FILE.replace("fedprox(mu=0.1)", "fedunheard"))
    with pytest.raises(ShoalError, match="no method called 'fedunheard'"):
        reproduce_table("small.toml")
    assert not (here / "runs").exists()
    reproduce_table("small.toml", only=["FedAvg"])


def test_figures_that_are_nowhere_or_several(here):
    (here / "small.toml").write_text(FILE.replace('"cifar10", model', '"cifar11", model'))
    with pytest.raises(ShoalError, match="published.csv has nothing of FedDHAD 3 with dataset 'cifar11'"):
        reproduce_table("small.toml")
    (here / "small.toml").write_text(FILE.replace('method = "', 'method = "Un'))
    with pytest.raises(ShoalError, match="for any row"):
        reproduce_table("small.toml")
    (here / "small.toml").write_text(FILE.replace('dataset = "cifar10", model', "model"))
    with pytest.raises(ShoalError, match="several figures"):
        reproduce_table("small.toml")


def test_a_target_for_all_columns_and_one_from_the_command_line(here):
    (here / "small.toml").write_text(FILE.replace("[base]", "[base]\ntarget = 0.01"))
    by = {(f.column, f.metric): f.measured for f in reproduce_table("small.toml", only=["FedAvg"]).figures}
    assert isinstance(by["Bare", "time_s_to_0.01"], float) and ("LeNet on C10", "time_s_to_0.54") in by
    later = reproduce_table("small.toml", only=["FedAvg"], changes={"target": 0.02}).figures
    assert {f.metric for f in later if f.column == "Bare"} == {"acc", "time_s_to_0.02", "mflops"}


def test_figures_of_ones_own():
    own = keys(row=[{"method": "X", "run": "fedavg", "published": {"A": {"acc": 1}}}])
    table = build_table("x", own)
    assert find_published(table, table.columns[0], table.rows[0]) == {"acc": 1.0}


# the command line -----------------------------------------------------------------------------------------------------
def test_the_command(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "small.toml", "--only", "FedAvg", "--only", "MOON", "-s", "rounds=1")
    assert code == 0 and "LeNet on C10" in out and "0.565" in out and SECONDS[:40] in out, err
    code, out, err = command(monkeypatch, capsys, "small.toml", "--only", "FedAvg", "-s", "rounds=1", "--json")
    assert {f["method"] for f in json.loads(out)["figures"]} == {"FedAvg"} and err == ""
    assert command(monkeypatch, capsys, "small.toml", "-s", "rounds=1", "--quiet") == (0, "", "")
    assert command(monkeypatch, capsys, "small.toml", "--only", "X")[0] == 10


def test_smoke_is_said_to_mean_nothing(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "small.toml", "--scale", "smoke")
    assert (
        code == 0 and "figures mean nothing" in out.replace("\n", " ") and Path("runs/small-smoke/table.md").is_file()
    )


def test_without_a_table_they_are_listed(here, monkeypatch, capsys):
    (here / "recipes").mkdir()
    (here / "recipes/mine.toml").write_text(FILE)
    (here / "recipes/broken.toml").write_text("[[row]]\nmethod = [/bold]\n")
    (here / "recipes/one-run.toml").write_text('method = "fedavg"\n')
    (here / "recipes/folder.toml").mkdir()
    code, out, _ = command(monkeypatch, capsys)
    assert code == 0 and all(name in out for name in (*NAMES, "mine", "a small one", "broken", "not a TOML file"))
    assert "one-run" not in out and "folder" not in out
    assert command(monkeypatch, capsys, "mine", "--only", "FedAvg", "-q")[0] == 0


def test_ones_own_table_goes_before_a_shipped_one(here):
    (here / "recipes").mkdir()
    (here / "recipes/feddhad-3.toml").write_text(FILE)
    assert read_table("feddhad-3").title == "a small one"
    assert set(list_tables()) == set(NAMES)


def test_the_example_in_the_repository():
    table = read_table(str(Path(__file__).parents[2] / "recipes/digits-table.toml"))
    for column in table.columns:
        for row in table.rows:
            assert isinstance(table.make_recipe(column, row, "full", {}), Recipe)


# files that are wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "found, words",
    [
        ({}, "`column` of a table is not given"),
        (keys(column=[]), "1 to 200"),
        (keys(row=[]), "1 to 200"),
        (keys(row=[5]), "1 to 200"),
        (keys(row={"method": "A", "run": "fedavg"}), "1 to 200"),
        (keys(rwo=[]), "Did you mean 'row'?"),
        (keys(paper=5), "a text of one line"),
        (keys(title="two\nlines"), "a text of one line"),
        (keys(notes="one"), "a list of texts"),
        (keys(base={"roundz": 5}), "Did you mean 'rounds'?"),
        (keys(base={"method": "fedavg"}), "`run` of a row"),
        (keys(base={"out": "/"}), "--out"),
        (keys(base=[]), "a table of recipe keys"),
        (keys(method="fedavg"), "recipe of one run"),
        (keys(column=[{"name": "A"}, {"name": "A"}]), "Two columns"),
        (keys(column=[{"name": "A 1"}, {"name": "a/1"}]), "Two columns"),
        (keys(column=[{"name": ".."}]), "a letter or digit"),
        (keys(column=[{"set": {}}]), "`name` of a column is not given"),
        (keys(column=[{"name": "A", "where": {"page": "3"}}]), "dataset, model and setting"),
        (keys(row=[{"method": "A", "run": "fedavg"}, {"method": "a", "run": "fedavg"}]), "Two rows"),
        (keys(row=[{"method": "A"}]), "either `run` or `missing`"),
        (keys(row=[{"method": "A", "run": "fedavg", "missing": "x"}]), "either `run` or `missing`"),
        (keys(row=[{"method": "A", "run": 5}]), "a method expression"),
        (keys(row=[{"method": "A", "run": {"B": "fedavg"}}]), "no column for the row A called 'B'"),
        (keys(row=[{"method": "A", "run": "fedavg", "published": {"A": {"acc": "high"}}}]), "numbers by column"),
        (keys(row=[{"method": "A", "run": "fedavg", "published": {"A": {"acc": 10**400}}}]), "numbers by column"),
    ],
)
def test_a_table_that_cannot_be_used(found, words):
    with pytest.raises(ShoalError) as error:
        build_table("x", found)
    assert words in str(error.value)
    assert error.value.kind.name in ("bad-recipe", "unknown-name")


@pytest.mark.parametrize("text", [b"\xff", b"row = ", b"a = 1\na = 2", b"x = [" * 5000, b"#" * 70_000])
def test_a_file_that_is_no_table(here, text):
    (here / "bad.toml").write_bytes(text)
    with pytest.raises(ShoalError) as error:
        read_table("bad.toml")
    assert error.value.kind.name == "bad-recipe" and "bad.toml" in str(error.value)


@pytest.mark.parametrize("name", ["nowhere.toml", "feddhad-33", "../tables/feddhad-3", ""])
def test_a_table_that_is_not_there(name):
    with pytest.raises(ShoalError) as error:
        read_table(name)
    assert error.value.kind.name in ("bad-recipe", "unknown-name")


ANY_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
names = st.text(max_size=12) | st.sampled_from(["A", "B", "a", "FedAvg", "-"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
recipe_keys = st.dictionaries(
    st.sampled_from(["rounds", "lr", "data", "steps", "metrics", "seed", "x"]), values, max_size=3
)
columns = st.fixed_dictionaries({"name": names}, optional={"set": recipe_keys, "where": values, "note": values})
rows = st.fixed_dictionaries(
    {"method": names},
    optional={"run": names | values, "missing": names, "set": recipe_keys, "published": values, "table": values},
)
protocols = values | st.dictionaries(
    st.sampled_from(["set", "seeds", "last", "maximum", "smooth", "run", "tuned", "variants", "clock", "notes"]),
    values | recipe_keys | st.dictionaries(names, names, max_size=2) | st.lists(st.integers(1, 50), max_size=2),
    max_size=3,
)
files = st.fixed_dictionaries(
    {"column": st.lists(columns, max_size=3), "row": st.lists(rows, max_size=3)},
    optional={"paper": values, "table": names, "title": names, "notes": values, "base": recipe_keys, "smoke": values}
    | {"fair": protocols, "authors": protocols | names},
)


@settings(deadline=None, max_examples=300, suppress_health_check=ANY_FIXTURE)
@given(files | st.dictionaries(names, values, max_size=4), st.sampled_from(["full", "smoke"]))
def test_any_file_is_a_table_or_refused_in_a_sentence(found, scale):
    try:
        table = build_table("x", found)
        table = table.apply_protocol("authors" if table.authors else "fair")
        for column in table.columns:
            assert Path(column.folder).name == column.folder not in ("", ".", "..")
            for row in table.rows:
                find_published(table, column, row)
                if row.find_expression(column):
                    assert isinstance(table.make_recipe(column, row, scale, {}), Recipe)
    except ShoalError as error:
        assert error.problem.endswith(".") and error.advice


@settings(deadline=None, max_examples=200, suppress_health_check=ANY_FIXTURE)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes_are_a_table_or_refused_in_a_sentence(content):
    Path("any.toml").write_bytes(content)
    with pytest.raises(ShoalError):
        read_table("any.toml")
