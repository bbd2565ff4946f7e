"""A table of samples: named columns of numbers, categories, dates, arrays or sequences, from any kind of frame."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.data.user_split import LARGEST, make_data_error

DATE = r"(\d{4}-\d\d-\d\d)(?:([T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)(?:Z| UTC|([+-])(\d\d):?(\d\d))?)?"
MISSING_RULES = ("refuse", "mean", "median", "zero", "flag")
"""What may become of missing values."""


@dataclass(frozen=True)
class ColumnRoles:
    """Which columns of a table are not inputs, by name ("": found by name where it is clear), and how gaps are filled.

    `label` is what is learnt, `owner` the device of a sample, `order` its time: the newest samples are the test half.
    """

    label: str = ""
    owner: str = ""
    order: str = ""
    missing: str = "refuse"

    def __post_init__(self):
        if self.missing not in MISSING_RULES:
            raise unknown_name_error("rule for missing values", str(self.missing), MISSING_RULES)


@dataclass(frozen=True, eq=False)
class SampleColumn:
    """One column. `kind` says what `values` are:

    `number` float64 with NaN for what is missing; `date` the same in days since 1970; `category` texts with None for
    what is missing; `array` one array with the samples first; `sequence` a list with one array per sample.
    """

    kind: str
    values: Any
    whole: bool = False
    """Whether numbers came as whole numbers or as yes and no."""
    names: tuple[str, ...] = ()
    """What the numbers of a column of classes stand for, where the source says so."""

    def take(self, rows: np.ndarray) -> "SampleColumn":
        values = [self.values[row] for row in rows] if self.kind == "sequence" else self.values[rows]
        return SampleColumn(self.kind, values, self.whole, self.names)

    def find_missing(self) -> np.ndarray:
        """Which samples have no value."""
        if self.kind in ("number", "date"):
            return np.isnan(self.values)
        if self.kind == "category":
            return np.array([value is None for value in self.values], dtype=bool)
        return np.zeros(len(self.values), dtype=bool)


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length by name, what the table is called in messages, and where its rows stand in a file."""

    columns: Mapping[str, SampleColumn]
    source: str = "The table"
    lines: Sequence[int] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).values) if self.columns else 0

    def take(self, rows: np.ndarray) -> "Table":
        lines = None if self.lines is None else [self.lines[row] for row in rows]
        return Table({name: column.take(rows) for name, column in self.columns.items()}, self.source, lines)

    def locate(self, row: int, column: str) -> str:
        """Where a cell is, for messages."""
        where = f"row {row}" if self.lines is None else f"line {self.lines[row]}"
        return f"{self.source}, {where}, column {column!r}"

    def require_column(self, name: str, role: str) -> SampleColumn:
        """The column of this name; another name is refused with the nearest one."""
        if name not in self.columns:
            raise unknown_name_error(f"column for `{role}`", name, map(str, self.columns))
        return self.columns[name]


def assemble_table(names: Sequence[Any], columns: Sequence[SampleColumn], source: str, lines: Any = None) -> Table:
    """A table whose columns have one name each and whose numbers single precision can hold."""
    texts = [str(name) for name in names]
    double = next((name for i, name in enumerate(texts) if name in texts[:i]), None)
    if double is not None:
        raise make_data_error(f"{source} has two columns of one name, {double!r}.", "Name each column once.")
    table = Table(dict(zip(texts, columns)), source, lines)
    if not len(table):
        raise ShoalError("no-data", f"{source} has no rows.", "Give at least one row below the head.")
    for name, column in table.columns.items():
        if column.kind == "number":
            too_large = np.abs(column.values) > LARGEST  # infinite ones among them
            if too_large.any():
                row = int(too_large.nonzero()[0][0])
                raise make_data_error(
                    f"{table.locate(row, name)}: {column.values[row]:g} is not a usable number.",
                    "Correct it or drop the column.",
                )
        elif column.kind in ("array", "sequence"):
            refuse_infinite_arrays(name, table)
    return table


def refuse_infinite_arrays(name: str, table: Table) -> None:
    """Refuse a column of arrays or sequences with a value that is missing, infinite or beyond single precision."""
    values = table.columns[name].values
    if isinstance(values, np.ndarray) and values.dtype.kind != "f":
        return
    for row, value in enumerate(values):
        value = np.asarray(value)
        if value.dtype.kind == "f" and not (np.abs(value) <= LARGEST).all():
            problem = f"{table.locate(row, name)}: the array holds a value that is not a number or not finite."
            raise make_data_error(problem, "Replace it or drop the row.")


def choose_columns(names: Sequence[Any], kinds: Mapping[str, str] | None, source: str) -> list[int]:
    """The places of the columns to read: all, or those that `kinds` names, of which at least one must be there."""
    chosen = [i for i, name in enumerate(names) if kinds is None or str(name) in kinds]
    if kinds and names and not chosen:
        problem = f"{source} has none of the columns that the model takes."
        raise make_data_error(problem, f"Give the columns {', '.join(kinds)}, with these names.")
    return chosen


def make_number_column(values: Any, whole: bool = False) -> SampleColumn:
    return SampleColumn("number", np.asarray(values, dtype=np.float64), whole)


def parse_dates(cells: Sequence[str]) -> np.ndarray | None:
    """Texts like 2024-01-31 or 2024-01-31 12:00 as dates of NumPy, "" as none; None where one is anything else.

    Those with a zone, like 2024-01-31 12:00+01:00, are in UTC.
    """
    if not any(cells):
        return None
    dates = []
    for cell in cells:
        match = re.fullmatch(DATE, cell)
        if cell and not match:
            return None
        try:
            dates.append(np.datetime64("NaT", "us") if match is None else read_moment(*match.groups()))
        except ValueError:
            return None
    return np.array(dates)


def read_moment(day: str, time: str | None, sign: str | None, hours: str | None, minutes: str | None) -> np.datetime64:
    """A date or a time as NumPy has it; `sign`, `hours` and `minutes` say how far its zone is ahead of UTC."""
    ahead = int(hours or 0) * 60 + int(minutes or 0)
    return np.datetime64(day + (time or ""), "us") - np.timedelta64(-ahead if sign == "-" else ahead, "m")


def make_category_column(values: Sequence[Any]) -> SampleColumn:
    """Texts; None, NaN and the missing values of pandas are missing."""
    texts = np.empty(len(values), dtype=object)
    texts[:] = [None if value is None or value != value else str(value) for value in values]
    return SampleColumn("category", texts)


def write_number(value: float) -> str:
    """A number as the text of a category: whole ones with all their digits, others with six, or more where these lack.

    So that it is the same text whether it came in single or in double precision.
    """
    value = float(value)
    if value.is_integer():
        return f"{value:.0f}"
    short = f"{value:g}"
    return short if np.float32(short) == np.float32(value) else str(value)


def make_date_column(values: Any) -> SampleColumn:
    """Dates of NumPy in days since 1970, with fractions."""
    moments = np.asarray(values, dtype="datetime64[us]")
    days = moments.astype(np.int64) / 86_400e6
    return SampleColumn("date", np.where(np.isnat(moments), np.nan, days))
