"""A CSV table: one sample in a line, columns of numbers, categories, dates or yes and no."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from shoal.core.errors import ShoalError, describe_error
from shoal.data.table import Table, assemble_table, choose_columns
from shoal.data.text_cells import TextCells, guess_text_column, parse_finite_number, read_known_column
from shoal.data.user_split import make_data_error


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
        refuse_counted_head(names, path)
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
        text = TextCells(names[i], [row[i].strip() for _, row in rows], lines, str(path), missing)
        columns.append(guess_text_column(text) if kinds is None else read_known_column(text, kinds[names[i]]))
    return assemble_table([names[i] for i in chosen], columns, str(path), lines)


def refuse_counted_head(names: list[str], path: Path) -> None:
    """A first line 0,1,2,... is the head of a table whose columns have no names, as pandas writes it, and no sample."""
    if len(names) > 2 and names == [str(i) for i in range(len(names))]:
        problem = (
            f"{path} begins with {','.join(names)[:40]}, which numbers the columns, and would be read as a sample."
        )
        raise make_data_error(problem, "Give the columns names, or leave that line out: to_csv(FILE, header=False).")


def refuse_other_delimiter(names: list[str], path: Path) -> None:
    """A head of one cell that would be several with another delimiter."""
    for mark, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(names) == 1 and mark in names[0]:
            raise make_data_error(f"{path} has {called} between its cells.", "Save it with commas.")
