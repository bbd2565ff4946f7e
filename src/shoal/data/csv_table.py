"""A CSV table: one sample in a line, columns of numbers, categories, dates or yes and no."""

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from shoal.core.errors import ShoalError, describe_error
from shoal.data.table import (
    SampleColumn,
    Table,
    assemble_table,
    choose_columns,
    make_category_column,
    make_date_column,
    make_number_column,
    parse_dates,
)
from shoal.data.user_split import LARGEST, make_data_error

NO_NUMBER = ("na", "n/a", "nan", "null", "none", "?")
"""What stands for a missing number in files, whatever its case."""
TRUTH = {"true": 1.0, "false": 0.0}


def read_csv_table(
    content: bytes, path: Path, missing: str = "refuse", kinds: Mapping[str, str] | None = None
) -> Table:
    """The columns of a CSV file, with a head unless its first line is all numbers.

    An empty cell is missing, and so are words like NA among numbers unless `missing` is `refuse`. Text among numbers
    or a row of another length is refused with its line. Where `kinds` says what columns are, by name, the others are
    not read, and cells that are something else are refused.
    """
    try:
        reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise make_data_error(
            f"{path} is not a CSV table ({describe_error(error)[:100]}).", "Save it as UTF-8 with commas."
        ) from error
    names = [cell.strip() for cell in rows[0][1]] if rows else []
    if all(parse_finite_number(cell) is not None for cell in names):
        names = [str(i + 1) for i in range(len(names))]
    else:
        rows = rows[1:]
    if not rows:
        raise ShoalError("no-data", f"{path} has no rows.", "Give at least one line below the head.")
    refuse_other_delimiter(names, path)
    for line, row in rows:
        if len(row) != len(names):
            raise make_data_error(
                f"{path}, line {line}: {len(row)} cells instead of {len(names)}.", "Complete the row."
            )
    lines = [line for line, _ in rows]
    chosen, columns = choose_columns(names, kinds, str(path)), []
    for i in chosen:
        cells, kind = [row[i].strip() for _, row in rows], (kinds or {}).get(names[i], "")
        columns.append(read_text_column(cells, names[i], path, lines, missing, kind))
    return assemble_table([names[i] for i in chosen], columns, str(path), lines)


def refuse_other_delimiter(names: list[str], path: Path) -> None:
    """A head of one cell that would be several with another delimiter."""
    for mark, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and mark in names[0]:
            raise make_data_error(f"{path} has {called} between its cells.", "Save it with commas.")


def read_text_column(
    cells: list[str], name: str, path: Path, lines: list[int], missing: str, kind: str = ""
) -> SampleColumn:
    """What the cells of a column are: the `kind` that is known, or numbers where half of those that are there are."""
    given = [cell for cell in cells if cell]
    numbers = [parse_finite_number(cell) for cell in cells]
    usable = sum(number is not None for number in numbers)
    words = [cell for cell in given if not kind or missing == "refuse" or cell.lower() not in NO_NUMBER]
    are_truths = bool(words) and all(cell.lower() in TRUTH for cell in words)
    if kind == "number" and not are_truths or not kind and usable and 2 * usable >= len(given):
        for cell, number, line in zip(cells, numbers, lines):
            if number is None and cell and (missing == "refuse" or cell.lower() not in NO_NUMBER):
                raise make_data_error(
                    f"{path}, line {line}, column {name!r}: {cell[:40]!r} is not a usable number.",
                    "Correct it or drop the column." if not kind else "The model takes numbers there: correct it.",
                )
        whole = all(re.fullmatch(r"[+-]?\d{1,15}", cell) for cell in given if cell.lower() not in NO_NUMBER)
        return make_number_column([np.nan if number is None else number for number in numbers], whole)
    if are_truths and kind != "category":
        return make_number_column([TRUTH.get(cell.lower(), np.nan) for cell in cells], True)
    dates = None if kind == "category" else parse_dates(cells)
    if dates is not None:
        return make_date_column(dates)
    if kind == "date" and given:
        odd, line = next((own, at) for own, at in zip(cells, lines) if own and parse_dates([own]) is None)
        where = f"{path}, line {line}, column {name!r}"
        raise make_data_error(f"{where}: {odd[:40]!r} is no date like 2024-01-31.", "Write it as in training.")
    return make_category_column([cell or None for cell in cells])


def parse_finite_number(cell: str) -> float | None:
    """A finite number that single precision can hold."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST and "_" not in cell else None
