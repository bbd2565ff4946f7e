"""Tables from whatever holds one: frames, data sets of Hugging Face, CSV and parquet files, and lists of these."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError
from shoal.data.csv_table import read_csv_table
from shoal.data.download import read_bytes
from shoal.data.frames import find_frame_kind, read_frame, read_python_values
from shoal.data.hf_data import is_hf_dataset, read_hf_table
from shoal.data.parquet_files import is_parquet, read_parquet
from shoal.data.table import SampleColumn, Table, assemble_table, make_category_column, make_number_column
from shoal.data.user_split import make_data_error
from shoal.storage.files import explain_disk_errors


def read_sample_table(data: Any, missing: str = "refuse", kinds: Mapping[str, str] | None = None) -> Table | None:
    """The table that an object or a file holds; None for what is no table.

    `kinds` says what columns are, by name, where that is known, and those alone are read.
    """
    if isinstance(data, str | Path):
        return read_table_file(Path(data).expanduser(), missing, kinds)
    if find_frame_kind(data):
        return read_frame(data, kinds=kinds)
    if is_hf_dataset(data):
        return read_hf_table(data, kinds=kinds)
    if isinstance(data, Mapping) and find_frame_kind(data.get("data")):
        return read_bunch(data, kinds)
    if isinstance(data, tuple) and len(data) == 2 and find_frame_kind(data[0]) and not find_frame_kind(data[1]):
        return add_column(read_frame(data[0], kinds=kinds), "label", read_label_series(data[1]))
    if isinstance(data, list) and data and all(find_frame_kind(own) or is_hf_dataset(own) for own in data):
        tables = [read_sample_table(own, missing, kinds) for own in data]
        return join_device_tables([table for table in tables if table is not None])
    return None


def read_bunch(bunch: Mapping[str, Any], kinds: Mapping[str, str] | None = None) -> Table:
    """A bunch of scikit-learn whose data are a frame, with the names of its classes."""
    table = read_frame(bunch["data"], kinds=kinds)
    target, names = bunch.get("target"), bunch.get("target_names")
    if target is None:
        raise make_data_error("The bunch has no target.", "Give (data, target) with one target per row.")
    column = read_label_series(target.to_numpy() if find_frame_kind(target) else target)
    if column.kind == "number" and column.whole and names is not None:
        column = SampleColumn("number", column.values, True, tuple(map(str, names)))
    return add_column(table, "label", column)


def read_label_series(values: Any) -> SampleColumn:
    """A series of pandas or polars, an array or a list as a column."""
    plain = values.tolist() if hasattr(values, "tolist") else values.to_list() if hasattr(values, "to_list") else values
    if not isinstance(plain, list | tuple):
        raise make_data_error(f"A {type(values).__name__} is no column of targets.", "Give one target per row.")
    present = [None if value is None or value != value else value for value in plain]
    return read_python_values(present, "label")


def add_column(table: Table, name: str, column: SampleColumn) -> Table:
    """The table with one column more, under a name that is not taken."""
    if len(column.values) != len(table):
        raise make_data_error(
            f"There are {len(table)} inputs but {len(column.values)} targets.", "Give one target per input."
        )
    if name in table.columns:
        raise make_data_error(f"{table.source} has a column {name!r}, and targets beside it.", "Leave one of them out.")
    return assemble_table([*table.columns, name], [*table.columns.values(), column], table.source, table.lines)


def join_device_tables(tables: list[Table]) -> Table:
    """Tables of one per device as one, whose column `owner` numbers them; all have the same columns."""
    for i, table in enumerate(tables):
        if table.columns.keys() != tables[0].columns.keys():
            odd = sorted(table.columns.keys() ^ tables[0].columns.keys())
            raise make_data_error(
                f"The columns of device {i} differ from those of device 0 ({', '.join(odd)[:60]}).",
                "Give all devices the same columns.",
            )
    if "owner" in tables[0].columns:
        problem = "The tables are one per device, and have a column 'owner' that says whose a row is as well."
        raise make_data_error(problem, "Drop or rename it, or give a single table.")
    columns = {name: join_columns([table.columns[name] for table in tables], name) for name in tables[0].columns}
    owners = make_number_column(np.repeat(np.arange(len(tables)), [len(table) for table in tables]), True)
    return add_column(Table(columns, "The list of tables"), "owner", owners)


def join_columns(columns: list[SampleColumn], name: str) -> SampleColumn:
    kinds = {column.kind for column in columns}
    if kinds <= {"array", "sequence"}:
        if kinds == {"array"} and len({column.values.shape[1:] for column in columns}) == 1:
            return SampleColumn("array", np.concatenate([column.values for column in columns]))
        return SampleColumn("sequence", [value for column in columns for value in column.values])
    if len(kinds) > 1:
        raise make_data_error(
            f"Column {name!r} is a {' and a '.join(sorted(kinds))} on different devices.", "Make them alike."
        )
    values = np.concatenate([column.values for column in columns])
    if kinds == {"category"}:
        return make_category_column(values.tolist())
    return SampleColumn(kinds.pop(), values, all(column.whole for column in columns), columns[0].names)


def read_table_file(path: Path, missing: str, kinds: Mapping[str, str] | None = None) -> Table | None:
    """A CSV or parquet file, or a folder of parquet files; None for other names."""
    with explain_disk_errors(path):
        exists, has_parquet = path.exists(), is_parquet(path)
    if path.suffix == ".csv" or path.suffix == ".tsv":
        if not exists:
            raise ShoalError("no-data", f"There is no file or folder {path}.", "Correct the name.")
        return read_csv_table(read_bytes(path), path, missing, kinds)
    if has_parquet:
        return read_parquet(path, kinds)
    return None
