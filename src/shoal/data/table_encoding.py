"""Columns of a table as inputs of a model, encoded with what the training half shows and nothing else."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.sequences import MASK, pad_sequences
from shoal.data.table import SampleColumn, Table, write_number
from shoal.data.text_cells import is_truth
from shoal.data.user_split import make_data_error

SCALARS = ("number", "date", "category")
"""Kinds of columns that become numbers side by side."""
MOST_CATEGORIES = 1000
"""A column with more different texts is no category."""
FREE_TEXT = 50
"""With more different texts than this, and one in every second row, a column is free text."""


@dataclass(frozen=True, eq=False)
class ColumnEncoding:
    """What the training half shows of one column of numbers, dates or texts."""

    name: str
    kind: str
    fill: float = 0.0
    """What stands for a missing number."""
    center: float = 0.0
    scale: float = 1.0
    """Dates are shifted and scaled to mean 0 and deviation 1; numbers stay as they are."""
    categories: tuple[str, ...] = ()
    flags: bool = False
    """Whether a further input says that the value is missing."""

    def encode(self, column: SampleColumn) -> np.ndarray:
        """(N, number of inputs): a number, or a 1 in the place of the category; nothing but zeros if it is unknown."""
        missing = column.find_missing()
        if self.kind == "category":
            places = self.number_categories()
            found = np.array([places.get(text, -1) for text in column.values])
            block = (found[:, None] == np.arange(len(self.categories))).astype(np.float32)
        else:
            filled = np.where(missing, self.fill, column.values)
            block = ((filled - self.center) / self.scale).astype(np.float32)[:, None]
        return np.concatenate((block, missing[:, None].astype(np.float32)), 1) if self.flags else block

    def number_categories(self) -> dict[str, int]:
        """The place of each category by its text; of true, false and whole numbers by what else packages write."""
        places = {text: i for i, text in enumerate(self.categories)}
        for text in filter(is_truth, self.categories):
            for spelling in (text.lower(), text.capitalize(), text.upper()):
                places.setdefault(spelling, places[text])
        for text in self.categories:
            if re.fullmatch(r"-?\d+", text):
                places.setdefault(f"{text}.0", places[text])
        return places


def fit_column(name: str, column: SampleColumn, rule: str) -> ColumnEncoding:
    """The encoding of a column of the training half, for a rule of `MISSING_RULES`."""
    missing = column.find_missing()
    if missing.all():
        raise make_data_error(f"Column {name!r} has no value in the training half.", "Drop the column.")
    flags = rule == "flag" and bool(missing.any())
    if column.kind == "category":
        return ColumnEncoding(name, "category", categories=find_categories(name, column), flags=flags)
    present = column.values[~missing]
    fill = 0.0 if rule == "zero" else float(np.median(present) if rule == "median" else present.mean())
    if column.kind == "date":
        center, scale = float(present.mean()), float(present.std()) or 1.0
        return ColumnEncoding(name, "date", center if rule == "zero" else fill, center, scale, flags=flags)
    return ColumnEncoding(name, "number", fill, flags=flags)


FILLING = 'Fill it, drop the row, or say missing = "mean", "median", "zero" or "flag".'


def refuse_gaps(name: str, table: Table, advice: str = FILLING) -> None:
    """Refuse a column with missing values, with the place of the first."""
    missing = table.columns[name].find_missing()
    if missing.any():
        more = f", and {int(missing.sum()) - 1} more" if missing.sum() > 1 else ""
        raise make_data_error(
            f"{table.locate(int(missing.nonzero()[0][0]), name)}: the cell is empty{more}.",
            advice,
        )


def find_categories(name: str, column: SampleColumn) -> tuple[str, ...]:
    """The texts of a column in sorted order; free text is refused."""
    texts = sorted({text for text in column.values if text is not None})
    if len(texts) > MOST_CATEGORIES or len(texts) > max(FREE_TEXT, len(column.values) / 2):
        raise make_data_error(
            f"Column {name!r} holds {len(texts)} different texts in {len(column.values)} training rows: it is no "
            "category.",
            DECIMAL_ADVICE
            if has_decimal_commas(column)
            else "Turn it into numbers (a tokeniser, a date, a code), or drop the column.",
        )
    return tuple(texts)


DECIMAL_ADVICE = 'Write the numbers with a point, 2.5 for 2,5: pandas.read_csv(FILE, decimal=",") reads such files.'


def has_decimal_commas(column: SampleColumn) -> bool:
    """Whether most texts of a column are numbers with a comma in them, like 2,5."""
    if column.kind != "category":
        return False
    texts = [text for text in column.values if text is not None]
    return 2 * sum(bool(re.fullmatch(r"[+-]?\d+,\d+", text)) for text in texts) > len(texts)


def remark_on_decimal_commas(name: str, column: SampleColumn) -> list[str]:
    """A remark about a column of numbers with decimal commas, which is read as one of categories."""
    if not has_decimal_commas(column):
        return []
    shown = next(text for text in column.values if text is not None and "," in text)
    told = f"Column {name!r} holds {shown[:30]!r} and the like, which are read as categories and not as numbers."
    return [f"{told} {DECIMAL_ADVICE}"]


def fit_columns(train: Table, rule: str) -> list[ColumnEncoding]:
    """The encodings of the columns of numbers, dates and texts of the training half."""
    scalars = {name: column for name, column in train.columns.items() if column.kind in SCALARS}
    return [fit_column(name, column, rule) for name, column in scalars.items()]


def encode_inputs(train: Table, test: Table, encodings: list[ColumnEncoding], rule: str) -> tuple[Any, Any, list[str]]:
    """Inputs of both halves by the encodings of the training half, and remarks about what the test half has beyond it.

    Numbers, dates and categories are one tensor (N, inputs). A single column of arrays of one shape is that tensor.
    With several, or with sequences, inputs are a dict by column, where `table` holds the numbers.
    """
    remarks: list[str] = []
    scalars = [encoding.name for encoding in encodings]
    halves: list[dict[str, Tensor]] = [{}, {}]
    if encodings:
        for inputs, table in zip(halves, (train, test)):
            inputs["table"] = encode_scalars(encodings, table)
        remarks = [text for own in encodings for text in remark_on_test(own, test, rule)]
    for inputs, own in zip(halves, encode_arrays(train, test, [name for name in train.columns if name not in scalars])):
        inputs |= own
    if all(len(inputs) == 1 for inputs in halves):
        return *(next(iter(inputs.values())) for inputs in halves), remarks  # type: ignore[return-value]
    return halves[0], halves[1], remarks


def encode_scalars(encodings: Sequence[ColumnEncoding], table: Table, rows: str = "the test half") -> Tensor:
    """(N, inputs): the columns of numbers, dates and texts of a table, side by side; `rows` is what it is called."""
    blocks = [own.encode(match_kind(own, table.columns[own.name], rows)) for own in encodings]
    return torch.from_numpy(np.concatenate(blocks, 1))


def match_kind(encoding: ColumnEncoding, column: SampleColumn, rows: str) -> SampleColumn:
    """The column, refused where it is of another kind than in the training half and not just empty."""
    if column.kind == encoding.kind:
        return column
    if encoding.kind == "category" and column.kind == "number" and not np.isnan(column.values).all():
        return write_numbers_as_texts(column)
    if column.find_missing().all():
        empty: Any = np.full(len(column.values), np.nan)
        return SampleColumn(encoding.kind, np.full(len(empty), None) if encoding.kind == "category" else empty)
    raise make_data_error(
        f"Column {encoding.name!r} is a {encoding.kind} in the training half and a {column.kind} in {rows}.",
        "Give both the same columns.",
    )


def write_numbers_as_texts(column: SampleColumn) -> SampleColumn:
    """Numbers as the texts of a category, whole ones with all their digits."""
    texts = [None if value != value else write_number(value) for value in column.values.tolist()]
    return SampleColumn("category", np.array(texts, dtype=object))


def remark_on_test(
    encoding: ColumnEncoding, test: Table, rule: str, rows: str = "test samples", where: str = "the test half only"
) -> list[str]:
    """What the test half, or new `rows`, have that training could not show."""
    column, name = test.columns[encoding.name], encoding.name
    missing = column.find_missing()
    remarks = []
    if encoding.kind == "category" and column.kind == "number":
        column = write_numbers_as_texts(column)
    if encoding.kind == "category" and column.kind == "category":
        known = encoding.number_categories()
        unknown = [text for text in column.values if text is not None and text not in known]
        if unknown:
            shown = ", ".join(repr(text)[:30] for text in sorted(set(unknown))[:3])
            remarks.append(
                f"Column {name!r}: {len(unknown)} of {len(column.values)} {rows} have a text that training "
                f"lacks ({shown}); they count as none of the known ones."
            )
    if missing.any() and rule == "flag" and not encoding.flags:
        remarks.append(
            f"Column {name!r} has gaps in {where}: they are filled with what training shows, without a flag."
        )
    return remarks


def encode_arrays(train: Table, test: Table, names: list[str]) -> list[dict[str, Tensor]]:
    """Both halves of the columns of arrays by name; sequences are padded, with a mask unless there is a column of it.

    The mask is `attention_mask`; a further column of other lengths has one under its own name.
    """
    halves: list[dict[str, Tensor]] = [{}, {}]
    masked: list[list[int]] = []
    for name in names:
        columns = [table.columns[name] for table in (train, test)]
        kinds = {column.kind for column in columns}
        if not kinds <= {"array", "sequence"}:
            raise make_data_error(f"Column {name!r} holds arrays in one half only.", "Give both halves alike columns.")
        if kinds == {"array"} and columns[0].values.shape[1:] == columns[1].values.shape[1:]:
            for inputs, column in zip(halves, columns):
                inputs[name] = convert_array(column.values)
            continue
        longest = max(len(value) for column in columns for value in column.values)
        for inputs, column in zip(halves, columns):
            inputs[name], mask = pad_sequences(column.values, f"column {name!r}", longest).values()
            lengths = [len(value) for value in train.columns[name].values]
            mask_name = MASK if not masked or masked[0] == lengths else f"{name}_mask"
            if mask_name not in names and name != MASK:
                inputs[mask_name] = mask
        if name != MASK:
            masked.append(lengths)
    return halves


def convert_array(values: np.ndarray) -> Tensor:
    """Bytes stay bytes, whole numbers and yes and no become int64, the rest single precision."""
    if values.dtype.kind == "f":
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return torch.from_numpy(values if values.dtype == np.uint8 else values.astype(np.int64))
