"""Predictions for new rows of a table: encoded as the training half was, by exports and by run folders."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import shoal
from shoal.cli.commands import run_command_line
from shoal.core.errors import ERROR_KINDS
from shoal.data.row_encoding import parse_table_encoding
from shoal.data.user_data import build_user_dataset
from shoal.runs.predict import load_program

HEAD = ["age", "city", "member", "visit", "kind"]
TINY = [
    "--devices",
    "4",
    "--sample",
    "4",
    "--rounds",
    "4",
    "--batch",
    "8",
    "--split",
    "iid",
    "--engine",
    "serial",
    "-q",
]


class Said(NamedTuple):
    code: int
    out: str
    err: str


def make_rows(count: int, first: int = 0) -> list[list[str]]:
    rows = []
    for i in range(first, first + count):
        age, city = 20 + 7 * i % 50, ["Bonn", "Kiel", "Ulm"][i % 3]
        kind = ["low", "mid", "high"][(age > 40) + (city == "Ulm" and i % 2)]
        rows.append([str(age), city, "true" if i % 4 else "unknown", f"2024-0{1 + i % 9}-1{i % 8}", kind])
    return rows


def write_rows(file: str | Path, rows: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> Path:
    text = io.StringIO()
    csv.writer(text).writerows([head, *rows])
    Path(file).write_text(text.getvalue())
    return Path(file)


def read_rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture(name="shoal_")
def _shoal(capsys, monkeypatch, tmp_path) -> Callable[..., Said]:
    """Call the command line in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        code = 0
        try:
            run_command_line()
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return call


def train(shoal_: Callable[..., Said], *words: object, ending: str = "pt2", test: Any = None, head: Any = HEAD) -> None:
    """A run on a folder with both halves, exported to `model.ENDING`."""
    Path("data").mkdir()
    write_rows("data/train.csv", make_rows(160), head)
    write_rows("data/test.csv", make_rows(40, 160) if test is None else test, head)
    assert shoal_("run", "--data", "data", "--out", "run", *TINY, *words).code == 0
    assert shoal_("export", "run", f"model.{ending}", "-q").code == 0


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
@pytest.mark.parametrize("words", [[], ["--normalise"]])
def test_predictions_are_those_that_the_run_was_judged_by(shoal_, ending, words):
    if ending == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package)
    train(shoal_, *words, ending=ending)
    told = shoal_("predict", f"model.{ending}", "data/test.csv")
    assert (told.code, told.err) == (0, "")
    found, wanted = read_rows(told.out), [row[-1] for row in make_rows(40, 160)]
    assert list(found[0]) == ["prediction", "p_high", "p_low", "p_mid"] and len(found) == 40
    accuracy = np.mean([row["prediction"] == label for row, label in zip(found, wanted)])
    assert accuracy == pytest.approx(json.loads(Path("run/history.jsonl").read_text().splitlines()[-1])["accuracy"])
    assert len({row["prediction"] for row in found}) > 1 or not words  # without it little is learnt
    for row in found:
        chances = {name: float(row[f"p_{name}"]) for name in ("high", "low", "mid")}
        assert sum(chances.values()) == pytest.approx(1) and row["prediction"] == max(chances, key=lambda n: chances[n])


def test_a_row_is_read_alike_in_any_company(shoal_):
    """Alone, with its columns in another order, with others beside it, from the run folder and from a frame."""
    train(shoal_)
    rows = make_rows(8, 160)
    whole = read_rows(shoal_("predict", "model.pt2", "data/test.csv").out)[:8]
    write_rows("mixed.csv", [["x", *reversed(row[:-1]), ""] for row in rows], ["note", *reversed(HEAD[:-1]), "id"])
    assert read_rows(shoal_("predict", "model.pt2", "mixed.csv").out) == whole
    for row, wanted in zip(rows, whole):
        assert row[2] in ("true", "unknown")  # alone it would be taken for yes and no
        (found,) = json.loads(shoal_("predict", "model.pt2", write_rows("one.csv", [row]), "--json").out)
        assert found["prediction"] == wanted["prediction"]
        assert found["p_low"] == pytest.approx(float(wanted["p_low"]), abs=1e-6)
    assert read_rows(shoal_("predict", "run", "mixed.csv").out)[3]["prediction"] == whole[3]["prediction"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(rows, columns=HEAD).astype({"age": int}).drop(columns="kind")
    assert [r["prediction"] for r in whole] == shoal.predict("model.pt2", frame).columns["prediction"]
    assert len(shoal.predict(Path("model.pt2"), frame).to_pandas()) == 8


@pytest.mark.parametrize("form", ["pandas", "polars", "arrow", "parquet", "datasets", "list"])
def test_columns_that_are_no_inputs_may_hold_anything(shoal_, form):
    """Beside them, a category stays one where all its new texts look like dates."""
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    rows = [[*row[:2], "unknown" if i % 3 else "2024-01-31", *row[3:]] for i, row in enumerate(make_rows(160))]
    Path("data").mkdir()
    write_rows("data/train.csv", rows)
    write_rows("data/test.csv", rows[:40])
    assert shoal_("run", "--data", "data", "--out", "run", *TINY).code == 0
    assert shoal_("export", "run", "model.pt2", "-q").code == 0
    write_rows("new.csv", [rows[0], rows[3]])
    expected = shoal.predict("model.pt2", "new.csv")
    frame = pandas.read_csv("new.csv").drop(columns="kind").assign(ratio=[np.inf, 1.0], owner=[1, 2])
    given: Any = frame.assign(note=[{"by": "me"}, {"by": "you"}])
    if form == "polars":
        given = pytest.importorskip("polars").DataFrame(given.to_dict("list"))
    elif form in ("arrow", "parquet"):
        given = arrow.Table.from_pandas(given)
        if form == "parquet":
            given.to_pandas().to_parquet("new.parquet")
            given = "new.parquet"
    elif form == "datasets":
        given = pytest.importorskip("datasets").Dataset.from_pandas(given)
    elif form == "list":
        given = [given[:1], given[1:]]
    found = shoal.predict("model.pt2", given)
    assert found.columns["p_low"] == pytest.approx(expected.columns["p_low"], abs=1e-6) and not found.remarks


@pytest.mark.parametrize("form", ["pandas", "missing", "categories", "polars", "arrow", "parquet", "datasets", "list"])
def test_yes_and_no_are_texts_in_a_column_of_texts(shoal_, form):
    """Packages make a column of nothing but true and false one of yes and no; in training it held unknown, too."""
    pandas, arrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    rows = [[*row[:2], ["TRUE", "False", "", "unknown"][i % 4], *row[3:]] for i, row in enumerate(make_rows(160))]
    Path("data").mkdir()
    write_rows("data/train.csv", rows)
    write_rows("data/test.csv", rows[:40])
    assert shoal_("run", "--data", "data", "-s", "missing=mean", "--out", "run", *TINY).code == 0
    cells = {"missing": ("TRUE", "False", ""), "list": ("TRUE", "False", "unknown")}.get(form, ("TRUE", "False"))
    chosen = [row for row in rows[:7] if row[2] in cells]
    expected = shoal.predict("run", write_rows("new.csv", chosen))
    given: Any = pandas.read_csv("new.csv").drop(columns="kind")
    if form == "list":
        given = [pandas.read_csv(write_rows(f"{i}.csv", [row])).drop(columns="kind") for i, row in enumerate(chosen)]
    else:
        assert given["member"].dtype == (object if form == "missing" else bool)
    if form == "categories":
        given = given.astype({"member": "category"})
    elif form == "polars":
        given = pytest.importorskip("polars").DataFrame(given.to_dict("list"))
    elif form in ("arrow", "parquet"):
        if form == "parquet":
            given.to_parquet("new.parquet")
        given = "new.parquet" if form == "parquet" else arrow.Table.from_pandas(given)
    elif form == "datasets":
        given = pytest.importorskip("datasets").Dataset.from_pandas(given)
    found = shoal.predict("run", given)
    assert found.columns["p_low"] == pytest.approx(expected.columns["p_low"], abs=1e-6) and not found.remarks
    assert len(set(found.columns["p_low"])) > 1


def test_predictions_are_written_once(shoal_):
    train(shoal_)
    words = ["predict", "model.pt2", "data/test.csv", "--out"]
    assert shoal_(*words, "found.csv").out == "found.csv: predictions for 40 rows\n"
    assert len(read_rows(Path("found.csv").read_text())) == 40
    said = shoal_(*words, "found.csv")
    assert said.code == ERROR_KINDS["bad-value"].code and "already there" in said.err and "--force" in said.err
    assert shoal_(*words, "found.csv", "--force", "-q") == (0, "", "")
    for folder in (".", "data"):
        said = shoal_(*words, folder, "--force")
        assert said.code == ERROR_KINDS["disk"].code and f"{folder} could not be written" in said.err
    before = Path("data/test.csv").read_bytes()
    assert shoal_(*words, "data/test.csv", "--force").code != 0 and Path("data/test.csv").read_bytes() == before


def test_names_that_no_file_can_have_are_refused(shoal_):
    train(shoal_)
    words = ["model.pt2", "data/test.csv", "--out", "found.csv"]
    for place, ending in ((0, "pt2"), (1, "csv"), (1, "parquet"), (3, "csv")):
        given = words.copy()
        given[place] = f"{'long' * 99}.{ending}"
        said = shoal_("predict", *given)
        assert said.code == ERROR_KINDS["disk"].code
        assert_says(said, "could not be written or read: File name too long")


def test_texts_that_training_lacks_are_told(shoal_):
    train(shoal_)
    rows = make_rows(3)
    rows[1][1] = "Rome"
    said = shoal_("predict", "model.pt2", write_rows("new.csv", rows))
    assert said.code == 0 and len(read_rows(said.out)) == 3
    assert "Column 'city': 1 of 3 rows have a text that training lacks ('Rome'); they count as none" in said.err
    assert shoal_("predict", "model.pt2", "new.csv", "-q").err == ""


def test_numbers_among_texts_keep_their_digits_and_unknown_ones_are_told(shoal_):
    pandas = pytest.importorskip("pandas")
    rows = [[*row[:1], "12345678" if row[1] == "Ulm" else row[1], *row[2:]] for row in make_rows(160)]
    train(shoal_, test=make_rows(40))
    Path("data/train.csv").unlink()
    write_rows("data/train.csv", rows)
    assert shoal_("run", "--data", "data", "--out", "again", *TINY).code == 0
    expected = shoal.predict("again", write_rows("new.csv", rows[8:9])).columns["p_low"]
    frame = pandas.read_csv("new.csv").drop(columns="kind")
    assert frame["city"].dtype == int
    for numbers in ([12345678], [12345678.0]):
        found = shoal.predict("again", frame.assign(city=numbers))
        assert found.columns["p_low"] == pytest.approx(expected) and not found.remarks
    unknown = shoal.predict("again", frame.assign(city=[7]))
    assert "1 of 1 rows have a text that training lacks ('7')" in unknown.remarks[0]


def change(row: int, column: int, cell: str) -> list[list[str]]:
    rows = make_rows(4)
    rows[row][column] = cell
    return rows


@pytest.mark.parametrize(
    "rows, head, says",
    [
        (
            [row[1:] for row in make_rows(4)],
            HEAD[1:],
            "new.csv lacks the column 'age', which the model takes.* age, city",
        ),
        (make_rows(3), ["a", "b", "c", "d", "e"], "new.csv has none of the columns that the model takes.* age, city"),
        (
            change(2, 0, "old"),
            HEAD,
            "line 4, column 'age': 'old' is not a usable number.*The model takes numbers there",
        ),
        ([["old", *row[1:]] for row in make_rows(4)], HEAD, "line 2, column 'age': 'old' is not a usable number"),
        (change(1, 3, "soon"), HEAD, "line 3, column 'visit': 'soon' is no date like 2024-01-31"),
        (change(0, 3, "7"), HEAD, "line 2, column 'visit': '7' is no date"),
        (change(1, 0, ""), HEAD, "line 3, column 'age': the cell is empty.*no cell was empty in training"),
        ([], HEAD, "no rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(shoal_, rows, head, says):
    train(shoal_)
    said = shoal_("predict", "model.pt2", write_rows("new.csv", rows, head))
    assert said.code in (ERROR_KINDS["bad-value"].code, ERROR_KINDS["no-data"].code) and said.out == ""
    assert_says(said, says)


def assert_says(said: Said, words: str) -> None:
    assert re.search(words, said.err, re.DOTALL) and "Traceback" not in said.err, said.err
    assert len(said.err.splitlines()) <= 3


def test_gaps_are_filled_as_in_training(shoal_):
    gaps = make_rows(40, 160)
    gaps[0][0] = gaps[1][1] = gaps[2][3] = ""
    train(shoal_, "-s", "missing=mean", test=gaps)
    found = read_rows(shoal_("predict", "model.pt2", "data/test.csv").out)
    result = json.loads(Path("run/history.jsonl").read_text().splitlines()[-1])
    assert np.mean([r["prediction"] == g[-1] for r, g in zip(found, gaps)]) == pytest.approx(result["accuracy"])
    ages = [float(row[0]) for row in make_rows(160)]
    mean = [[str(np.mean(ages)), *gaps[0][1:]]]
    for rows in (mean, gaps[:1]):  # a row of nothing but its gap, too
        (row,) = json.loads(shoal_("predict", "model.pt2", write_rows("one.csv", rows), "--json").out)
        assert row["p_low"] == pytest.approx(float(found[0]["p_low"]), abs=1e-6)


def test_words_for_gaps_stand_among_yes_and_no_as_among_numbers(shoal_):
    """Training saw true, false and empty cells, which are numbers, and no NA."""
    rows = [[*row[:2], ["true", "false", ""][i % 3], *row[3:]] for i, row in enumerate(make_rows(160))]
    Path("data").mkdir()
    write_rows("data/train.csv", rows)
    write_rows("data/test.csv", rows[:40])
    assert shoal_("run", "--data", "data", "-s", "missing=mean", "--out", "run", *TINY).code == 0
    found = [
        shoal.predict(
            "run", write_rows("new.csv", [[*rows[i][:2], cell, *rows[i][3:]] for i, cell in enumerate(cells)])
        )
        for cells in (("true", ""), ("true", "NA"))
    ]
    assert found[0].columns == found[1].columns
    odd = write_rows("odd.csv", [[*rows[i][:2], cell, *rows[i][3:]] for i, cell in enumerate(("true", "", "perhaps"))])
    with pytest.raises(shoal.ShoalError, match=r"line 4, column '\w+': 'perhaps' is neither true nor false"):
        shoal.predict("run", odd)


@pytest.mark.parametrize(
    "label, columns",
    [
        ("price", ["prediction"]),
        ("price,size", ["price", "size"]),
        ("sold", ["prediction", "p_0", "p_1"]),
        ("sold,new", ["sold", "new", "p_sold", "p_new"]),
        ("sold,p_sold", ["sold", "p_sold", "p_sold_2", "p_p_sold"]),
        ("kind", ["prediction", "p_a", "p_b"]),
    ],
)
def test_every_task_has_its_columns(shoal_, label, columns):
    head = ["x", "y", "price", "size", "sold", "new", "p_sold", "kind"]
    rows = [
        [*map(str, (i % 7, i % 5, i % 7 * 0.5 + 0.25, i % 5 + 0.5, i % 2, int(i % 3 > 0), int(i % 5 > 1)))]
        for i in range(60)
    ]
    write_rows("all.csv", [[*row, "ab"[i % 2]] for i, row in enumerate(rows)], head)
    assert shoal_("run", "--data", "all.csv", "-s", f"label={label}", "--out", "run", *TINY).code == 0
    assert shoal_("export", "run", "model.pt2", "-q").code == 0
    told = shoal_("predict", "model.pt2", "all.csv")
    assert told.code == 0 and list(read_rows(told.out)[0]) == columns, told.err
    result, found = shoal.predict("run", "all.csv"), read_rows(told.out)
    for key, values in result.columns.items():
        printed = [row[key] for row in found]
        same = printed if isinstance(values[0], str) else list(map(float, printed))
        assert same == (values if isinstance(values[0], str) else pytest.approx(values, abs=1e-5)), key


def test_what_is_no_model_of_a_table_is_refused(shoal_):
    new = write_rows("new.csv", make_rows(2))
    assert shoal_("run", "--out", "digits", *TINY).code == 0
    assert shoal_("export", "digits", "digits.pt2", "-q").code == 0
    assert shoal_("export", "digits", "digits.safetensors", "-q").code == 0
    Path("torn.pt2").write_bytes(b"nothing of the kind")
    Path("torn.onnx").write_bytes(b"nothing of the kind")
    for model, kind, says in (
        ("digits.pt2", "bad-value", "digits.pt2 does not say how the columns of a table become its inputs"),
        ("digits", "bad-value", "digits does not say how the columns"),
        ("digits.safetensors", "bad-value", "holds tensors alone.*.pt2 or .onnx"),
        ("new.csv", "bad-value", "new.csv is no program"),
        ("none.pt2", "no-data", "There is no file or folder none.pt2"),
        ("torn.pt2", "damaged", "torn.pt2 is damaged"),
    ):
        said = shoal_("predict", model, new)
        assert said.code == ERROR_KINDS[kind].code, said.err
        assert_says(said, says)
    train(shoal_)
    for rows, says in (("none.csv", "There is no file or folder none.csv"), ("model.pt2", "model.pt2 is no table")):
        assert_says(shoal_("predict", "model.pt2", rows), says)


def test_an_export_says_what_it_knows_of_a_table(shoal_):
    train(shoal_)
    said = shoal_("export", "run", "again.pt2")
    assert (
        "knows how 4 columns of a table become its inputs, and names 5 texts of categories: shoal predict" in said.out
    )
    extra = {"about.json": ""}
    torch.export.load("again.pt2", extra_files=extra)
    noted = json.loads(extra["about.json"])["table"]
    assert noted["label"] == "kind" and noted["task"] == "classify" and noted["class_names"] == ["high", "low", "mid"]
    assert [(c["name"], c["kind"]) for c in noted["columns"]] == [
        ("age", "number"), ("city", "category"), ("member", "category"), ("visit", "date"),
    ]  # fmt: skip
    own = build_user_dataset("data").encoding
    assert own and parse_table_encoding(noted).to_dict() == own.to_dict()
    age: dict[str, Any] = {"name": "age", "kind": "number"}
    for broken in (
        {},
        noted | {"columns": []},
        noted | {"columns": "age"},
        noted | {"columns": [["age"]]},
        noted | {"missing": "x"},
        noted | {"label": 3},
        noted | {"class_names": [["low"], ["high"]]},
        *(
            noted | {"columns": [age | wrong]}
            for wrong in (
                {"kind": "b"},
                {"name": ["age"]},
                {"scale": 0},
                {"scale": 10**400},
                {"fill": float("nan")},
                {"kind": "category", "categories": [["Bonn"]]},
            )
        ),
    ):
        with pytest.raises(ValueError, match="columns"):
            parse_table_encoding(broken)


def test_programs_that_do_not_fit_what_their_files_note_are_refused(shoal_, monkeypatch):
    train(shoal_)
    program, about = load_program(Path("model.pt2"))
    fewer = about["table"] | {"columns": about["table"]["columns"][1:]}
    for noted, says in (
        ([], "does not say how the columns"),
        (None, "does not say how the columns"),
        (about | {"table": [1]}, "model.pt2 is damaged.*how its columns are read"),
        (about | {"table": fewer}, "model.pt2 is damaged.*its program fails"),
        (about | {"input_dtype": "load"}, "model.pt2 is damaged.*in which type of numbers"),
        (about | {"input_dtype": "int64"}, "model.pt2 is damaged.*its program fails"),
        ({"table": about["table"]}, "model.pt2 is damaged.*in which type of numbers"),
    ):
        monkeypatch.setattr("shoal.runs.predict.load_program", lambda path, noted=noted: (program, noted))
        assert_says(shoal_("predict", "model.pt2", "data/test.csv"), says)
