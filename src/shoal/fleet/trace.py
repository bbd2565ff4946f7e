"""A fleet from a file: what devices could really do, round by round."""

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
"""Numbers that may be 0; a speed or a memory of nothing would never end a round."""
SMALLEST, LARGEST = 1e-9, 1e18


@dataclass(frozen=True, eq=False)
class TraceFleet:
    """A CSV table with the columns device, and of round, macs, down, up, seconds, available those that are known.

    Without a column `round` a device's row holds for the whole run; with it, every round needs one.
    """

    profiles: dict[tuple[int, int], DeviceProfile]
    there: np.ndarray | None
    """Rounds x devices, or None when all are there always."""
    by_round: bool

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        return self.profiles[device, round if self.by_round else 0]

    def get_available_mask(self, round: int) -> np.ndarray | None:
        return None if self.there is None else self.there[round if self.by_round else 0]

    @classmethod
    def read(cls, name: str, devices: int, rounds: int) -> "TraceFleet":
        (top, head), *rows = read_trace_lines(name)
        columns = check_columns(head, name, top)
        by_round = "round" in columns
        profiles: dict[tuple[int, int], DeviceProfile] = {}
        first: dict[tuple[int, int], int] = {}
        there = np.ones((rounds if by_round else 1, devices), dtype=bool)
        for line, cells in rows:
            row = dict(check_cells(columns, cells, name, line))
            at = int(row.pop("device")), int(row.pop("round", 0))
            if first.setdefault(at, line) != line:
                whose = f"device {at[0]}" + (f" in round {at[1]}" if by_round else "")
                raise trace_error(name, f"lines {first[at]} and {line} are both about {whose}", "Keep one of them.")
            available = row.pop("available", 1) > 0
            profiles[at] = DeviceProfile(**row)
            if at[0] < devices and at[1] < len(there):
                there[at[1], at[0]] = available
        for round in range(len(there)):
            for device in range(devices):
                if (device, round) not in profiles:
                    what = f"device {device} in round {round}" if by_round else f"device {device}"
                    advice = f"The run has {devices} devices and {rounds} rounds: give a row for each, or run less."
                    raise ShoalError("no-data", f"The trace {name} has no row for {what}.", advice)
        return cls(profiles, None if there.all() else there, by_round)


def read_trace_lines(name: str) -> list[tuple[int, list[str]]]:
    """The lines of a CSV file that are not blank, with their numbers; the first holds the column names."""
    try:
        with open(Path(name), newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
    except (OSError, ValueError, csv.Error) as error:
        raise ShoalError("no-data", f"The trace {name} cannot be read: {error}.", "Give a CSV file.") from error
    return lines or [(1, [])]


def check_columns(head: list[str], name: str, line: int) -> list[str]:
    """The column names, if all are known, none is there twice and one is `device`."""
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
    """The numbers of one line by column."""
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
    """The number in a cell, or None, and what it must be."""
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
