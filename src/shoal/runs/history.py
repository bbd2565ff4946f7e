"""The history of a run: one row per round, totals, costs to a target, and the file that stores it."""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.runs.history_rows import SUMMED, SUMMED_WHERE_TOLD, parse_row
from shoal.storage.files import damaged_file_error, explain_disk_errors, write_bytes

WALL = ("wall_seconds",)
"""Columns that differ between two runs of the same recipe."""


class History:
    """The rows of a run in the order of rounds; `history[column]` is the list of a column's values."""

    def __init__(self, rows: Sequence[Row] = ()):
        self.rows: list[Row] = []
        self._sums: dict[str, float] = dict.fromkeys((*SUMMED, *SUMMED_WHERE_TOLD), 0)
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        self.rows.append(row)
        for column in self._sums:
            self._sums[column] += row.get(column) or 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row.get(column) for row in self.rows]

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns by name; None where a round has no value."""
        names = dict.fromkeys(key for row in self.rows for key in row)
        return {name: self[name] for name in names}

    def to_pandas(self):
        """The same as a DataFrame."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ShoalError("missing-extra", "pandas is not installed.", "Run: pip install pandas.") from None
        return DataFrame(self.to_dict())

    def last(self, column: str) -> Any:
        """The newest value of a column that is not None."""
        return next((row[column] for row in reversed(self.rows) if row.get(column) is not None), None)

    @property
    def best(self) -> float | None:
        """The highest accuracy of any round."""
        return max((a for a in self["accuracy"] if a is not None), default=None)

    def total(self, *columns: str) -> float:
        """The sum of these columns over all rounds."""
        return sum(self._sums[c] for c in columns)

    def cost_to_target(self, accuracy: float) -> dict[str, float] | None:
        """Rounds, simulated seconds, bytes and MACs until the accuracy was first reached; None if it never was."""
        for number, row in enumerate(self.rows):
            if row.get("accuracy") is not None and row["accuracy"] >= accuracy:
                spent = History(self.rows[: number + 1])
                return {
                    "rounds": number + 1,
                    "sim_seconds": spent.total("sim_seconds"),
                    "bytes": spent.total("bytes_down", "bytes_up"),
                    "macs": spent.total("macs_work"),
                }
        return None

    def accuracy_at_budget(self, budget: float, *columns: str) -> float | None:
        """The accuracy of the last evaluated round until which these columns add up to no more than the budget."""
        accuracy, spent = None, dict.fromkeys(columns, 0)
        for row in self.rows:
            spent = {c: before + (row.get(c) or 0) for c, before in spent.items()}
            if sum(spent.values()) > budget:
                break
            accuracy = accuracy if row.get("accuracy") is None else row["accuracy"]
        return accuracy

    def equals_except_wall_time(self, other: "History") -> bool:
        """Whether two histories agree in every column but wall time."""
        return [drop_wall_time(r) for r in self.rows] == [drop_wall_time(r) for r in other.rows]


def drop_wall_time(row: Row) -> Row:
    return {k: v for k, v in row.items() if k not in WALL}


def encode_row(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def clear_nonfinite_values(row: Row) -> Row:
    """A row as JSON can hold it: None in place of numbers that are not finite."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in row.items()}


def read_history(path: Path, rounds: int | None = None, more_lines: bytes = b"") -> History:
    """The first `rounds` rows of a file, or all; an unfinished last line, which a kill leaves, is ignored.

    Where the file has fewer rows, those that follow are taken from `more_lines`, which a checkpoint keeps.
    """
    if not path.exists():
        lines: list[bytes] = []
    else:
        with explain_disk_errors(path):
            lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if rounds is not None and len(lines) < rounds:
        lines += more_lines.splitlines(keepends=True)[len(lines) :]
    rows = []
    for number, text in enumerate(lines if rounds is None else lines[:rounds]):
        try:
            rows.append(parse_row(text, number))
        except (ValueError, RecursionError) as error:
            raise damaged_file_error(path, f"line {number + 1}: {error}") from error
    if rounds is not None and len(rows) < rounds:
        raise damaged_file_error(path, f"it has {len(rows)} rows, the checkpoint is of round {rounds}")
    return History(rows)


def write_history(path: Path, history: History) -> None:
    write_bytes(path, b"".join(encode_row(row) for row in history.rows))
