"""Tables from every source: one data set from the same values, encoded with what the training half shows alone."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.data.cache import read_stored_dataset, store_dataset
from shoal.data.dataset import Dataset
from shoal.data.table_sources import read_sample_table
from shoal.data.user_data import build_user_dataset
from shoal.runs.fingerprint import fingerprint_dataset
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import count_devices, load_recipe_dataset

pandas = pytest.importorskip("pandas")

ROLES: dict[str, Any] = dict(label="sick", owner="hospital", order="when", missing="flag")


def make_frame(rows: int = 60) -> Any:
    """Numbers with a gap, categories, yes and no, dates, owners and named classes."""
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": rng.integers(20, 80, rows),
            "weight": rng.normal(70, 9, rows).round(3),
            "city": rng.choice(["Rome", "Oslo", "Bern"], rows),
            "smokes": rng.random(rows) < 0.5,
            "hospital": rng.choice(["north", "east", "south"], rows),
            "when": pandas.date_range("2024-01-01", periods=rows)[rng.permutation(rows)],
        }
    )
    frame["sick"] = np.where(frame["age"] > 50, "yes", "no")
    frame.loc[3, "weight"] = np.nan
    frame.loc[5, "city"] = None
    return frame


def write_source(kind: str, folder: Path) -> Any:
    frame = make_frame()
    if kind == "csv":
        frame.to_csv(folder / "t.csv", index=False)
        return folder / "t.csv"
    if kind == "pandas":
        return frame
    pytest.importorskip("pyarrow")
    if kind == "parquet":
        frame.to_parquet(folder / "t.parquet", index=False)
        return folder / "t.parquet"
    if kind == "parquet-folder":
        frame[:31].to_parquet(folder / "0.parquet", index=False)
        frame[31:].to_parquet(folder / "1.parquet", index=False)
        return folder
    if kind == "arrow":
        import pyarrow

        return pyarrow.Table.from_pandas(frame, preserve_index=False)
    if kind.startswith("polars"):
        polars = pytest.importorskip("polars")
        return polars.from_pandas(frame).lazy() if kind == "polars-lazy" else polars.from_pandas(frame)
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_pandas(frame, preserve_index=False)
    if kind == "hf":
        return made
    made.save_to_disk(str(folder / "saved"))
    return f"hf:{folder / 'saved'}"


SOURCES = ("csv", "parquet", "parquet-folder", "arrow", "polars", "polars-lazy", "hf", "hf-folder")


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_data_set(kind, tmp_path):
    expected = build_user_dataset(make_frame(), **ROLES)
    own = build_user_dataset(write_source(kind, tmp_path), **ROLES)
    assert fingerprint_dataset(own) == fingerprint_dataset(expected)
    assert own.class_names == ("no", "yes") and own.remarks == expected.remarks


def test_a_frame_by_hand():
    train = pandas.DataFrame({"n": [1.0, np.nan, 4.0], "c": ["b", "a", "b"], "y": ["x", "z", "x"]})
    test = pandas.DataFrame({"n": [np.nan, 8.0], "c": ["new", "a"], "y": ["z", "x"]})
    own = build_user_dataset((train, test), missing="mean")
    assert own.inputs.tolist() == [[1, 0, 1], [2.5, 1, 0], [4, 0, 1]]
    assert own.test_inputs.tolist() == [[2.5, 0, 0], [8, 1, 0]]
    assert own.targets.tolist() == [0, 1, 0] and own.class_names == ("x", "z") and own.classes == 2
    assert len(own.remarks) == 1 and "1 of 2 test samples" in own.remarks[0] and "'new'" in own.remarks[0]
    for rule, filled in (("median", 2.5), ("zero", 0.0)):
        assert build_user_dataset((train, test), missing=rule).inputs[1, 0] == filled
    flagged = build_user_dataset((train, test), missing="flag")
    assert flagged.inputs.tolist() == [[1, 0, 0, 1], [2.5, 1, 1, 0], [4, 0, 0, 1]]
    assert flagged.test_inputs[0].tolist() == [2.5, 1, 0, 0]
    with pytest.raises(ShoalError, match="row 1, column 'n': the cell is empty"):
        build_user_dataset((train, test))


def test_what_the_test_half_holds_changes_nothing_about_the_training_half():
    frame = make_frame()
    one = build_user_dataset((frame[:40], frame[40:]), **ROLES)
    other = frame[40:].assign(weight=1e6, city="Paris", when=pandas.Timestamp("2050-01-01"))
    two = build_user_dataset((frame[:40], other), **ROLES)
    assert torch.equal(one.inputs, two.inputs) and not torch.equal(one.test_inputs, two.test_inputs)


def test_old_samples_train_and_new_ones_test():
    own = build_user_dataset(make_frame().drop(columns="sick"), label="age", order="when", missing="mean")
    frame = make_frame()
    newest = set(frame.nlargest(12, "when")["age"].tolist())
    assert set(own.test_targets.tolist()) == newest and own.order is not None and len(own.order) == 48
    recipe_like = build_user_dataset({"x": torch.eye(10), "y": [0, 1] * 5, "order": [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]})
    assert recipe_like.test_inputs.argmax(1).tolist() == [0, 1]


@pytest.mark.parametrize(
    "values, dtype, classes, names",
    [
        ([0, 1, 2, 1], torch.int64, 3, ()),
        ([True, False, True, True], torch.int64, 2, ()),
        ([-1, 1, 1, -1], torch.int64, 2, ("-1", "1")),
        (["b", "a", "b", "b"], torch.int64, 2, ("a", "b")),
        (["3", "1", "3", "3"], torch.int64, 4, ()),
        ([0.5, 1.5, -2.0, 7.0], torch.float32, 1, ()),
    ],
)
def test_targets_are_classes_or_numbers(values, dtype, classes, names):
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "target": values})
    own = build_user_dataset((frame, frame))
    assert own.targets.dtype == dtype and own.classes == classes and own.class_names == names


def test_categories_of_pandas_and_a_series_as_target():
    frame = pandas.DataFrame({"a": pandas.Categorical(["u", "v", "u"]), "b": [1, 2, 3]})
    own = build_user_dataset((frame, pandas.Series(["x", "y", "x"]), frame, pandas.Series(["y", "y", "y"])))
    assert own.inputs.tolist() == [[1, 0, 1], [0, 1, 2], [1, 0, 3]] and own.class_names == ("x", "y")


def test_columns_of_arrays_make_a_dict():
    frame = pandas.DataFrame({"a": [1.0, 2.0], "tokens": [[3, 4], [5]], "label": [0, 1]})
    longer = pandas.DataFrame({"a": [3.0], "tokens": [[6, 7, 8]], "label": [1]})
    own = build_user_dataset((frame, longer))
    assert own.inputs["tokens"].tolist() == [[3, 4, 0], [5, 0, 0]] and own.inputs["table"].tolist() == [[1], [2]]
    assert own.inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert own.test_inputs["tokens"].tolist() == [[6, 7, 8]]
    images = pandas.DataFrame({"image": list(np.zeros((3, 1, 4, 4), np.uint8)), "label": [0, 1, 0]})
    assert build_user_dataset((images, images)).inputs.shape == (3, 1, 4, 4)


def test_lists_of_frames_are_devices():
    frame = make_frame().drop(columns="hospital")
    own = build_user_dataset([frame[:10], frame[10:40], frame[40:]], label="sick", missing="mean", test=frame)
    assert own.owners is not None and np.bincount(own.owners).tolist() == [10, 30, 20]


def test_an_owner_column_makes_the_devices(tmp_path):
    recipe = Recipe().with_values(data=str(write_source("csv", tmp_path)), **ROLES)
    assert recipe.split == "owner" and recipe.devices == 0 and recipe.sample == 5
    assert count_devices(recipe, load_recipe_dataset(recipe, RandomStreams(0))) == 3
    again = Recipe().with_values(**json.loads(json.dumps(vars(recipe))))
    assert again == recipe and again.fingerprint() == recipe.fingerprint()
    fixed = Recipe().with_values(data=recipe.data, split="iid", devices=7, **ROLES)
    assert (fixed.split, fixed.devices) == ("iid", 7)
    result = shoal.run(data=make_frame(), normalise=True, rounds=2, engine="serial", **ROLES)
    rows = shoal.run(**{**vars(recipe), "normalise": True, "rounds": 2, "engine": "serial"}).history.rows
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in result.history.rows]


def test_a_run_with_owners_is_resumed(tmp_path):
    keys: dict[str, Any] = dict(normalise=True, engine="serial", out=str(tmp_path / "run"), **ROLES)
    whole = shoal.run(data=make_frame(), rounds=3, **{**keys, "out": ""})
    shoal.run(data=make_frame(), rounds=1, **keys)
    resumed = shoal.resume(tmp_path / "run", data=make_frame(), rounds=3)
    assert [row["loss"] for row in resumed.history.rows] == [row["loss"] for row in whole.history.rows]


def test_roles_of_data_that_are_objects_are_not_varied():
    with pytest.raises(ShoalError, match="missing is 'zero', and the data were read with 'flag'"):
        shoal.compare(["fedavg"], vary=["missing=flag,zero"], data=make_frame(), rounds=1, engine="serial", **ROLES)


@pytest.mark.parametrize("form", ["table", "dict", "tuple"])
def test_a_data_set_is_stored_as_a_whole(form, tmp_path):
    x: Any = {"a/b": torch.eye(6), "0": torch.arange(6)[:, None]}
    own = {
        "table": lambda: build_user_dataset(make_frame(), **ROLES),
        "dict": lambda: build_user_dataset((x, ["u", "v"] * 3)),
        "tuple": lambda: build_user_dataset((tuple(x.values()), torch.arange(6.0))),
    }[form]()
    store_dataset(own, tmp_path / "stored")
    again = read_stored_dataset(tmp_path / "stored")
    assert again is not None and fingerprint_dataset(again) == fingerprint_dataset(own)
    assert again.remarks == own.remarks and again.class_names == own.class_names


def test_bunches_of_scikit_learn():
    bunch = {"data": np.eye(4), "target": np.array([0, 1, 1, 0]), "target_names": np.array(["cat", "dog"]), "DESCR": ""}
    assert build_user_dataset(bunch, test_share=0.5).class_names == ("cat", "dog")
    framed = bunch | {"data": pandas.DataFrame(np.eye(4)), "target": pandas.Series([0, 1, 1, 0]), "frame": None}
    own = build_user_dataset(framed, test_share=0.5)
    assert own.class_names == ("cat", "dog") and own.inputs.shape == (2, 4)
    assert build_user_dataset(bunch | {"target": np.array([0.5, 1, 2, 3])}).targets.dtype == torch.float32


cell = st.one_of(st.none(), st.integers(-5, 5), st.floats(-1e3, 1e3), st.sampled_from(["a", "b"]), st.booleans())


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(cell, min_size=6, max_size=6), min_size=2, max_size=4),
    st.sampled_from(["refuse", "mean", "median", "zero", "flag"]),
)
def test_any_frame_is_read_or_refused_in_one_sentence(columns, missing):
    frame = pandas.DataFrame({f"c{i}": pandas.Series(values, dtype=object) for i, values in enumerate(columns)})
    try:
        own: Dataset = build_user_dataset(frame, test_share=0.34, missing=missing)
    except ShoalError as error:
        assert "\n" not in str(error) and error.advice
    else:
        assert bool(own.inputs.isfinite().all()) and len(own.inputs) == 4 and len(own.test_inputs) == 2


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_column_of_numbers_is_learnt_as_numbers_on_devices_of_owners(engine):
    frame = make_frame().assign(weight=lambda own: own["age"] / 40).drop(columns="sick")
    result = shoal.run(
        data=frame, label="weight", owner="hospital", missing="zero", normalise=True, rounds=8, lr=0.05, engine=engine
    )
    rows = result.history.rows
    assert rows[-1]["mae"] < rows[0]["mae"] and rows[-1]["mae"] < 0.2


def test_durations_decimals_and_categories_of_numbers():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    hours, label = [datetime.timedelta(hours=6 * i) for i in range(20)], np.arange(20) % 2
    amounts = [decimal.Decimal(i) / 4 for i in range(20)]
    for frame in (
        pandas.DataFrame({"hours": hours, "amount": amounts, "label": label}),
        polars.DataFrame({"hours": hours, "amount": amounts, "label": label}),
    ):
        own = build_user_dataset(frame, test=frame)
        assert own.inputs[:, 0].tolist() == own.inputs[:, 1].tolist() == [i / 4 for i in range(20)]
    codes = pandas.Categorical([None, 3, 1, 2] * 5)
    coded = build_user_dataset(pandas.DataFrame({"code": codes, "label": label}), missing="mean")
    assert coded.inputs.shape == (16, 3) and set(coded.inputs.sum(1).tolist()) == {0.0, 1.0}
    classes = build_user_dataset(
        pandas.DataFrame({"a": np.arange(20.0), "label": pandas.Categorical([2, 0, 1, 1] * 5)})
    )
    assert classes.classes == 3 and not classes.class_names


def test_texts_of_a_frame_that_are_dates_are_dates_as_in_a_file(tmp_path):
    """What `pandas.read_csv` gives for a column of dates is text."""
    pd = pytest.importorskip("pandas")
    days = [f"2024-0{1 + i % 9}-{1 + i % 28:02d}" for i in range(100)]
    frame = pd.DataFrame(
        {"since": [None, *days[1:]], "size": [float(i) for i in range(100)], "left": ["no", "yes"] * 50}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    given = build_user_dataset(pd.read_csv(tmp_path / "t.csv"), missing="mean")
    read = build_user_dataset(tmp_path / "t.csv", missing="mean")
    assert given.inputs.shape == (80, 2) and torch.equal(given.inputs, read.inputs)


def test_numbers_with_a_decimal_comma_are_told(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("size,town,label\n" + "".join(f'"{i % 9},5","a,b",{i % 2}\n' for i in range(40)))
    remarks = build_user_dataset(path).remarks
    assert len(remarks) == 1 and "Column 'size' holds '" in remarks[0] and "read as categories" in remarks[0]
    assert 'decimal=","' in remarks[0] and "2.5 for 2,5" in remarks[0]
    path.write_text("size,label\n" + "".join(f'"{i},{i}",{i % 2}\n' for i in range(200)))
    with pytest.raises(ShoalError, match="160 different texts .* Write the numbers with a point"):
        build_user_dataset(path)
    path.write_text("size,label\n" + "".join(f'{i},"{i % 3},5"\n' for i in range(40)))
    assert "Column 'label'" in build_user_dataset(path).remarks[0]


@pytest.mark.parametrize("form", [list, np.array])
def test_arrays_in_a_column_are_finite_or_refused(form):
    for odd in (float("nan"), float("inf"), 1e300):
        rows = [form([1.0, float(i)]) for i in range(19)] + [form([1.0, odd])]
        for values in (rows, [form([1.0]), *rows[1:]]):  # one shape, and sequences
            with pytest.raises(ShoalError, match="row 19, column 'a': the array holds"):
                build_user_dataset(pandas.DataFrame({"a": values, "label": np.arange(20) % 2}), test_share=0.5)


def test_owners_that_a_column_of_numbers_does_not_tell_apart_are_refused(tmp_path):
    owners = np.array([1234567890123456789, 1234567890123456790] * 10)
    frame = pandas.DataFrame({"a": np.arange(20.0), "owner": owners, "label": np.arange(20) % 2})
    frame.to_csv(tmp_path / "own.csv", index=False)
    for data in (frame, tmp_path / "own.csv"):
        with pytest.raises(ShoalError, match="column 'owner': numbers of 16 digits and more"):
            build_user_dataset(data)
    named = build_user_dataset(frame.assign(owner=frame["owner"].astype(str)))
    assert named.owners is not None and set(named.owners.tolist()) == {0, 1}


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_categories_of_numbers_keep_the_digits_that_tell_them_apart(kind):
    values = np.array([1234567, 1234568, 0.1, 1.2345671, 1.2345682], kind)
    frame = pandas.DataFrame({"a": np.tile(values, 4), "label": np.arange(20) % 2})
    trained = build_user_dataset(frame.assign(a=frame["a"].astype("category")), test=frame)
    assert isinstance(trained.inputs, torch.Tensor) and trained.inputs.shape == (20, 5)
    assert torch.equal(trained.inputs, trained.test_inputs) and not trained.remarks
    assert trained.encoding is not None and {"0.1", "1234567"} < set(trained.encoding.columns[0].categories)


@pytest.mark.parametrize("rate", ["D", "123456789ns"])
def test_times_with_a_zone_are_dates_in_a_file_as_in_a_frame(rate, tmp_path):
    """pandas writes them like 2024-01-01 00:00:00.123456789+01:00."""
    times = pandas.date_range("2024-01-01 00:30", periods=40, freq=rate, tz="Europe/Berlin")
    frame = pandas.DataFrame({"when": times, "label": np.arange(40) % 2})
    frame.to_csv(tmp_path / "own.csv", index=False)
    given, read = build_user_dataset(frame), build_user_dataset(tmp_path / "own.csv")
    assert read.encoding is not None and given.encoding is not None
    assert read.encoding.columns[0].kind == "date" and torch.equal(given.inputs, read.inputs)
    assert read.encoding.columns[0].center == given.encoding.columns[0].center


def test_tables_of_devices_that_say_whose_rows_are_whose_are_refused_with_the_column():
    tables = [pandas.DataFrame({"a": [1.0, 2.0], "owner": [0, 1], "label": [0, 1]})] * 2
    with pytest.raises(ShoalError, match="one per device, and have a column 'owner'"):
        build_user_dataset(tables)


def test_categories_of_numbers_are_the_same_in_arrow_and_in_files(tmp_path):
    """Arrow keeps that a column of pandas is one of categories; a file has 3.0 where a gap made it real."""
    arrow = pytest.importorskip("pyarrow")
    for values in ([3, 7], [0.25, 3.0]):
        frame = pandas.DataFrame({"code": pandas.Categorical(values * 10), "label": np.arange(20) % 2})
        given = build_user_dataset(frame)
        other = build_user_dataset(arrow.Table.from_pandas(frame))
        assert isinstance(given.inputs, torch.Tensor) and torch.equal(other.inputs, given.inputs)  # type: ignore[arg-type]
        frame.astype({"code": float}).to_csv(tmp_path / "new.csv", index=False)
        assert given.encoding is not None
        table = read_sample_table(tmp_path / "new.csv", kinds=given.encoding.kinds)
        assert table is not None
        inputs, remarks = given.encoding.encode_rows(table)
        assert inputs.argmax(1).tolist() == [0, 1] * 10 and not remarks


def test_a_line_that_numbers_the_columns_is_no_sample(tmp_path):
    frame = pandas.DataFrame(np.c_[np.random.default_rng(0).random((20, 3)), np.arange(20) % 2])
    frame.to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(ShoalError, match="begins with 0,1,2,3, which numbers the columns"):
        build_user_dataset(tmp_path / "own.csv")
    frame.to_csv(tmp_path / "own.csv", index=False, header=False)
    dataset = build_user_dataset(tmp_path / "own.csv")
    assert len(dataset.targets) + len(dataset.test_targets) == 20
