"""A CSV table: one sample in a line, one column with its label, perhaps one with its device."""

import csv
import io
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.data.user_split import LARGEST, UserSamples, make_data_error, number_owners


def read_csv_table(content: bytes, path: Path) -> UserSamples:
    """A CSV table of numbers, with a head unless its first line is all numbers.

    The target is the column `label` or `target`, or else the last; `device` or `owner` gives the device.
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
    if len(set(names)) != len(names):
        raise make_data_error(f"{path} has two columns of one name.", "Name each column once.")
    special = {key: i for i, key in enumerate(names) if key.lower() in ("device", "owner")}
    device = next(iter(special.values()), None)
    marked = [i for i, key in enumerate(names) if key.lower() in ("label", "target")]
    target = marked[0] if marked else max((i for i in range(len(names)) if i != device), default=0)
    columns = [i for i in range(len(names)) if i not in (target, device)]
    if len(special) > 1 or len(marked) > 1 or not columns:
        raise make_data_error(
            f"{path} has the columns {', '.join(names)[:80]!r}.",
            "It needs one column for the target, at most one for the device, and at least one more.",
        )
    x = np.empty((len(rows), len(columns)), np.float32)
    for at, (line, row) in enumerate(rows):
        if len(row) != len(names):
            raise make_data_error(
                f"{path}, line {line}: {len(row)} cells instead of {len(names)}.", "Complete the row."
            )
        for i, cell in enumerate(row):
            if not cell.strip():
                raise make_data_error(
                    f"{path}, line {line}, column {names[i]!r}: the cell is empty.", "Fill it or drop the row."
                )
        for to, i in enumerate(columns):
            value = parse_finite_number(row[i])
            if value is None:
                where = f"{path}, line {line}, column {names[i]!r}"
                raise make_data_error(
                    f"{where}: {row[i][:40]!r} is not a usable number.", "Correct it or drop the column."
                )
            x[at, to] = value
    owners = None if device is None else number_owners([row[device].strip() for _, row in rows])
    return UserSamples(torch.from_numpy(x), [row[target].strip() for _, row in rows], owners)


def parse_finite_number(cell: str) -> float | None:
    """A finite number that single precision can hold."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST and "_" not in cell else None
