"""What the texts in a column mean: numbers, yes and no, dates or categories."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.core.errors import ShoalError
from shoal.data.table import (
    SampleColumn,
    make_category_column,
    make_date_column,
    make_number_column,
    parse_dates,
)
from shoal.data.user_split import LARGEST, make_data_error

NO_NUMBER = ("na", "n/a", "nan", "null", "none", "?")
"""What stands for a missing number in files, whatever its case."""
TRUTH = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True)
class TextCells:
    """The cells of a column of a file, empty ones included, and the lines that they are from."""

    name: str
    cells: list[str]
    lines: list[int]
    path: str
    missing: str = "refuse"
    """What is done about gaps; with `refuse` words like NA are no gaps."""

    @cached_property
    def nonempty_cells(self) -> list[str]:
        return [cell for cell in self.cells if cell]

    @cached_property
    def numbers(self) -> list[float | None]:
        return [parse_finite_number(cell) for cell in self.cells]

    @cached_property
    def words(self) -> list[str]:
        """The cells that are neither empty nor stand for a missing number."""
        return [cell for cell in self.nonempty_cells if not self.is_gap(cell)]

    def is_gap(self, cell: str) -> bool:
        return not cell or self.missing != "refuse" and cell.lower() in NO_NUMBER

    def find_first(self, is_odd: Callable[[str], bool]) -> tuple[str, int] | None:
        """The first cell of that kind that is not empty, and its line."""
        return next(((cell, line) for cell, line in zip(self.cells, self.lines) if cell and is_odd(cell)), None)

    def make_error(self, odd: tuple[str, int], problem: str, advice: str) -> ShoalError:
        cell, line = odd
        where = f"{self.path}, line {line}, column {self.name!r}"
        return make_data_error(f"{where}: {cell[:40]!r} is {problem}.", advice)


def guess_text_column(text: TextCells) -> SampleColumn:
    """Numbers where half of the cells that are there are, else yes and no or dates where all are, else categories."""
    usable = sum(number is not None for number in text.numbers)
    if usable and 2 * usable >= len(text.nonempty_cells):
        return make_numbers(text, "Correct it or drop the column.")
    if text.nonempty_cells and all(map(is_truth, text.nonempty_cells)):
        return make_truths(text)
    dates = parse_dates(text.cells)
    return make_categories(text) if dates is None else make_date_column(dates)


def read_known_column(text: TextCells, kind: str) -> SampleColumn:
    """A column of which it is known that it holds numbers, dates or categories; other cells are refused."""
    if kind == "category":
        return make_categories(text)
    if kind == "number":
        has_truths = any(map(is_truth, text.words)) and all(number is None for number in text.numbers)
        return make_truths(text) if has_truths else make_numbers(text, "The model takes numbers there: correct it.")
    dates = parse_dates(text.cells)
    odd = text.find_first(lambda cell: parse_dates([cell]) is None)
    if dates is None and odd:
        raise text.make_error(odd, "no date like 2024-01-31", "Write it as in training.")
    return make_categories(text) if dates is None else make_date_column(dates)


def make_numbers(text: TextCells, advice: str) -> SampleColumn:
    if odd := text.find_first(lambda cell: parse_finite_number(cell) is None and not text.is_gap(cell)):
        raise text.make_error(odd, "not a usable number", advice)
    whole = all(re.fullmatch(r"[+-]?\d{1,15}", cell) for cell in text.nonempty_cells if cell.lower() not in NO_NUMBER)
    return make_number_column([np.nan if number is None else number for number in text.numbers], whole)


def make_truths(text: TextCells) -> SampleColumn:
    """Yes and no as 1 and 0."""
    if odd := text.find_first(lambda cell: not is_truth(cell) and not text.is_gap(cell)):
        raise text.make_error(odd, "neither true nor false", "The model takes these there: correct it.")
    return make_number_column([TRUTH.get(cell.lower(), np.nan) for cell in text.cells], True)


def make_categories(text: TextCells) -> SampleColumn:
    return make_category_column([cell or None for cell in text.cells])


def is_truth(cell: str) -> bool:
    return cell.lower() in TRUTH


def parse_finite_number(cell: str) -> float | None:
    """A finite number that single precision can hold."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST and "_" not in cell else None
