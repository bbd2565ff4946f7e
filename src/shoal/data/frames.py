"""Frames of pandas, polars and Arrow as tables of NumPy columns; none of these packages is imported here."""

import datetime
import decimal
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.core.errors import describe_error
from shoal.data.table import (
    SampleColumn,
    Table,
    assemble_table,
    choose_columns,
    make_category_column,
    make_date_column,
    make_number_column,
    parse_dates,
    write_number,
)
from shoal.data.user_split import make_data_error

ONE_DAY = datetime.timedelta(days=1)
PLAIN_MODES = {"1": "L", "P": "RGB", "PA": "RGBA"}
"""What images of Pillow are brought to whose values are no brightness, by their mode."""


def find_frame_kind(data: Any) -> str:
    """`pandas`, `polars` or `arrow` for a frame of that package, "" for anything else."""
    kind = type(data)
    package = kind.__module__.partition(".")[0]
    if package in ("pandas", "polars") and kind.__name__ == "DataFrame":
        return package
    if package == "polars" and kind.__name__ == "LazyFrame":
        return package
    return "arrow" if package == "pyarrow" and kind.__name__ == "Table" else ""


def read_frame(frame: Any, source: str = "The frame", kinds: Mapping[str, str] | None = None) -> Table:
    """The columns of a frame; the index of pandas is not read, nor what `kinds` does not name where that is given."""
    package, kinds_by_name = find_frame_kind(frame), kinds or {}
    frame = frame.collect() if package == "polars" and hasattr(frame, "collect") else frame
    names = frame.column_names if package == "arrow" else [join_column_name(name) for name in frame.columns]
    chosen, columns = choose_columns(names, kinds, source), []
    for i in chosen:
        kind = kinds_by_name.get(names[i], "")
        if package == "pandas":
            columns.append(read_pandas_column(frame.iloc[:, i], names[i], kind))
        elif package == "polars":
            columns.append(read_polars_column(frame[names[i]], kind))
        else:
            columns.append(read_arrow_column(frame.column(i), names[i], kind))
    return assemble_table([names[i] for i in chosen], columns, source)


def join_column_name(name: Any) -> str:
    """The name of a column; levels of a MultiIndex have a dot between them."""
    return ".".join(map(str, name)) if isinstance(name, tuple) else str(name)


def read_pandas_column(series: Any, name: str, known_kind: str = "") -> SampleColumn:
    dtype = series.dtype
    kind = getattr(dtype, "kind", "O")
    if str(dtype) == "category":
        names = dtype.categories
        if getattr(names.dtype, "kind", "O") not in "buif":
            return read_pandas_column(series.astype(names.dtype), name, known_kind)
        texts = [write_number(value) if names.dtype.kind == "f" else str(value) for value in names.to_numpy()]
        return make_category_column([None if code < 0 else texts[code] for code in series.cat.codes.tolist()])
    if kind == "M":
        moments = series.dt.tz_convert("UTC").dt.tz_localize(None) if getattr(dtype, "tz", None) else series
        return make_date_column(moments.to_numpy(dtype="datetime64[us]"))
    if kind == "m":
        return make_number_column(series.dt.total_seconds().to_numpy(dtype=np.float64) / 86_400)
    if kind in "buif" and not (kind == "b" and known_kind == "category"):
        return make_number_column(series.to_numpy(dtype=np.float64, na_value=np.nan), kind in "bui")
    missing = series.isna().to_numpy()
    values = [None if gap else value for value, gap in zip(series.tolist(), missing)]
    return read_python_values(values, name, known_kind)


def read_polars_column(series: Any, known_kind: str = "") -> SampleColumn:
    dtype = series.dtype
    is_truth = str(dtype) == "Boolean"
    if dtype.is_numeric() or is_truth and known_kind != "category":
        whole = dtype.is_integer() or is_truth
        values = (
            [np.nan if value is None else float(value) for value in series.to_list()] if series.null_count() else None
        )
        return make_number_column(series.to_numpy() if values is None else values, whole)
    return read_python_values(series.to_list(), series.name, known_kind)


def read_arrow_column(column: Any, name: str, known_kind: str = "") -> SampleColumn:
    kind = str(column.type)
    is_truth = kind == "bool"
    is_number = kind.startswith(("int", "uint", "float", "double", "halffloat"))
    if kind.startswith(("dictionary<values=int", "dictionary<values=uint")) and known_kind != "number":
        return make_category_column([None if value is None else str(value) for value in column.to_pylist()])
    if kind.startswith(("dictionary<values=float", "dictionary<values=double")) and known_kind != "number":
        return make_category_column([None if value is None else write_number(value) for value in column.to_pylist()])
    if is_number or is_truth and known_kind != "category":
        if not column.null_count and not is_truth:
            return make_number_column(column.to_numpy(), not kind.startswith(("float", "double", "half")))
        values = [np.nan if value is None else float(value) for value in column.to_pylist()]
        return make_number_column(values, is_truth or "int" in kind)
    return read_python_values(column.to_pylist(), name, known_kind)


def read_python_values(values: Sequence[Any], name: str, known_kind: str = "") -> SampleColumn:
    """A column of Python objects: texts, dates, numbers, lists or arrays; what is None is missing.

    Texts that look like dates are dates, and yes and no are numbers, unless the column is known to be a category.
    """
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, str) for value in present):
        dates = parse_dates(["" if value is None else value.strip() for value in values])
        if dates is not None and known_kind != "category":
            return make_date_column(dates)
        return make_category_column(values)
    if known_kind == "category" and present and all(isinstance(value, bool | np.bool_) for value in present):
        return make_category_column([None if value is None else "true" if value else "false" for value in values])
    if present and all(isinstance(value, bool | int | float | np.number | np.bool_) for value in present):
        whole = all(isinstance(value, bool | int | np.integer | np.bool_) for value in present)
        return make_number_column([np.nan if value is None else float(value) for value in values], whole)
    if present and all(isinstance(value, datetime.date) for value in present):  # a datetime is a date, too
        return make_date_column([np.datetime64("NaT") if value is None else drop_zone(value) for value in values])
    if present and all(isinstance(value, datetime.timedelta) for value in present):
        return make_number_column([np.nan if value is None else value / ONE_DAY for value in values])
    if present and all(isinstance(value, decimal.Decimal) for value in present):
        return make_number_column([np.nan if value is None else float(value) for value in values])
    if present and all(isinstance(value, list | tuple | np.ndarray) for value in present):
        return make_array_column(values, name)
    if present and all(hasattr(value, "getbands") for value in present):
        return make_array_column([None if value is None else convert_image(value) for value in values], name)
    if not present:
        return make_number_column(np.full(len(values), np.nan))
    kinds = sorted({type(value).__name__ for value in present})
    raise make_data_error(
        f"Column {name!r} holds {' and '.join(kinds)[:80]}.",
        "Make it all numbers, texts, yes and no, dates, or lists of numbers, or drop the column.",
    )


def drop_zone(moment: Any) -> np.datetime64:
    """A date or a time, in UTC where it has a zone."""
    if isinstance(moment, datetime.datetime) and moment.tzinfo is not None:
        moment = moment.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.datetime64(moment, "us")


def refuse_wide_pixels(image: Any, called: str) -> None:
    """Refuse an image of Pillow whose pixels are whole numbers beyond a byte."""
    if image.mode.startswith("I"):
        problem = f"{called} has pixels of 16 or 32 bits (mode {image.mode}), which do not fit into bytes."
        raise make_data_error(problem, "Save it with 8 bits, or give arrays of real numbers from 0 to 1.")


def convert_image(image: Any) -> np.ndarray:
    """An image of Pillow as bytes with the channels first; numbers of colours become the colours."""
    refuse_wide_pixels(image, "An image")
    pixels = np.asarray(image.convert(PLAIN_MODES.get(image.mode, image.mode)))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def make_array_column(values: Sequence[Any], name: str) -> SampleColumn:
    """Arrays of one shape become one array, lists of unequal length sequences; anything else is refused."""
    gap = next((i for i, value in enumerate(values) if value is None), None)
    if gap is not None:
        raise make_data_error(f"Row {gap} of column {name!r} has no array.", "Drop the row or fill it.")
    try:
        arrays = [np.asarray(value) for value in values]
    except ValueError as error:
        raise make_data_error(
            f"Column {name!r} holds lists that are no arrays ({describe_error(error)[:60]}).", "Make them regular."
        ) from error
    odd = next((i for i, array in enumerate(arrays) if array.dtype.kind not in "buif" and array.size), None)
    if odd is not None:
        raise make_data_error(
            f"Row {odd} of column {name!r} holds {arrays[odd].dtype}, not numbers.", "Turn texts into numbers first."
        )
    if len({array.shape for array in arrays}) == 1:
        return SampleColumn("array", np.stack(arrays))
    if len({array.shape[1:] for array in arrays if array.size}) == 1 and arrays[0].ndim in (1, 2):
        return SampleColumn("sequence", arrays)
    row = next(i for i, array in enumerate(arrays) if array.shape != arrays[0].shape)
    raise make_data_error(
        f"Row {row} of column {name!r} has the shape {arrays[row].shape}, row 0 {arrays[0].shape}.",
        "Bring all to one size, for example with a transform.",
    )
