"""A fleet from a CSV file with the measured speed, link and availability of devices, round by round."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from shoal.core.errors import ShoalError
from shoal.fleet.profile import DeviceProfile

NUMBERS = ("macs", "down", "up", "seconds", "joules_mac", "joules_byte", "memory")
COLUMNS = ("device", "round", *NUMBERS, "available")
FROM_ZERO = ("seconds", "joules_mac", "joules_byte")
"""Columns that may be 0; with a speed or a memory of 0 a round would never end."""
SMALLEST, LARGEST = 1e-9, 1e18


@dataclass(frozen=True, eq=False)
class TraceFleet:
    """A CSV table with the columns device, and of round, macs, down, up, seconds, available those that are known.

    Without a column `round` a device's row holds for the whole run; with it, every round needs one.
    """

    profiles: dict[tuple[int, int], DeviceProfile]
    available: np.ndarray | None
    """Rounds x devices, or None when all devices are always available."""
    by_round: bool

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        return self.profiles[device, round if self.by_round else 0]

    def get_available_mask(self, round: int) -> np.ndarray | None:
        return None if self.available is None else self.available[round if self.by_round else 0]

    @classmethod
    def read(cls, name: str, devices: int, rounds: int) -> "TraceFleet":
        """The fleet in a CSV file, which must have a row for each device (and round, where it has that column)."""
        (first_line, head), *rows = read_trace_lines(name)
        columns = check_columns(head, name, first_line)
        by_round = "round" in columns
        profiles: dict[tuple[int, int], DeviceProfile] = {}
        line_of: dict[tuple[int, int], int] = {}
        available = np.ones((rounds if by_round else 1, devices), dtype=bool)
        for line, cells in rows:
            row = dict(check_cells(columns, cells, name, line))
            key = int(row.pop("device")), int(row.pop("round", 0))
            if line_of.setdefault(key, line) != line:
                whose = f"device {key[0]}" + (f" in round {key[1]}" if by_round else "")
                raise trace_error(name, f"lines {line_of[key]} and {line} are both about {whose}", "Keep one of them.")
            is_available = row.pop("available", 1) > 0
            profiles[key] = DeviceProfile(**row)
            if key[0] < devices and key[1] < len(available):
                available[key[1], key[0]] = is_available
        for round in range(len(available)):
            for device in range(devices):
                if (device, round) not in profiles:
                    what = f"device {device} in round {round}" if by_round else f"device {device}"
                    advice = f"The run has {devices} devices and {rounds} rounds: give a row for each, or run less."
                    raise ShoalError("no-data", f"The trace {name} has no row for {what}.", advice)
        return cls(profiles, None if available.all() else available, by_round)


def read_trace_lines(name: str) -> list[tuple[int, list[str]]]:
    """(line number, cells) of each line of a CSV file that is not blank; the first holds the column names."""
    try:
        with open(Path(name), newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except (OSError, ValueError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ShoalError("no-data", f"The trace {name} cannot be read: {why}.", "Give a CSV file.") from error
    return lines or [(1, [])]


def check_columns(head: list[str], name: str, line: int) -> list[str]:
    """The column names; an error unless all are known, none is repeated and one is `device`."""
    if "device" not in head:
        raise ShoalError(
            "no-data", f"The trace {name} has no column `device`.", "Begin it with a line of column names."
        )
    for number, column in enumerate(head, 1):
        if column not in COLUMNS:
            near = get_close_matches(column.lower(), COLUMNS, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else f"Take it out; known are {', '.join(COLUMNS)}."
            raise trace_error(name, f"line {line}, column {number}: there is no column called {column[:40]!r}", advice)
        if head.index(column) + 1 < number:
            raise trace_error(name, f"line {line}, column {number}: {column} is there twice", "Keep one of them.")
    return head


def check_cells(columns: list[str], cells: list[str], name: str, line: int) -> Iterator[tuple[str, float]]:
    """(column, number) of each cell of a line; an error for a cell that holds no such number."""
    if len(cells) != len(columns):
        found = f"line {line} has {len(cells)} cells and there are {len(columns)} columns"
        raise trace_error(name, found, f"Give one cell for each of {', '.join(columns)}.")
    for column, cell in zip(columns, cells):
        value, wanted = parse_trace_cell(column, cell)
        if value is None:
            found = f"is {cell[:40]!r}" if cell else "is empty"
            advice = f"It must be {wanted}" + ("." if cell else "; leave the column out if it is not known.")
            raise trace_error(name, f"{column} in line {line} {found}", advice)
        yield column, value


def parse_trace_cell(column: str, cell: str) -> tuple[float | None, str]:
    """The number in a cell (None where it does not fit its column), and a text of what it must be."""
    if column in ("device", "round"):
        fits = cell.isascii() and cell.isdecimal() and len(cell) < 10
        return int(cell) if fits else None, "a whole number from 0 up"
    try:
        value = float(cell) if "_" not in cell else -1.0
    except ValueError:
        value = -1.0
    if column == "available":
        return value if value in (0, 1) else None, "0 or 1"
    low = 0 if column in FROM_ZERO else SMALLEST
    return value if low <= value <= LARGEST else None, f"a number from {low:g} to {LARGEST:g}"


def trace_error(name: str, found: str, advice: str) -> ShoalError:
    return ShoalError("no-data", f"In the trace {name} {found}.", advice)
