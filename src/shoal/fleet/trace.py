"""A fleet from a file: what devices could really do, round by round."""

import csv
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from shoal.core.errors import ShoalError
from shoal.fleet.profile import Profile

NUMBERS = ("macs", "down", "up", "seconds", "joules_mac", "joules_byte", "memory")


@dataclass(frozen=True, eq=False)
class Trace:
    """A CSV table with the columns device, and of round, macs, down, up, seconds, available those that are known.

    Without a column `round` a device's row holds for the whole run; with it, every round needs one.
    """

    profiles: dict[tuple[int, int], Profile]
    there: np.ndarray | None
    """Rounds x devices, or None when all are there always."""
    by_round: bool

    def profile(self, device: int, round: int) -> Profile:
        return self.profiles[device, round if self.by_round else 0]

    def available(self, round: int) -> np.ndarray | None:
        return None if self.there is None else self.there[round if self.by_round else 0]

    @classmethod
    def read(cls, name: str, devices: int, rounds: int) -> "Trace":
        path = Path(name)
        try:
            with open(path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, ValueError, csv.Error) as error:
            raise ShoalError("no-data", f"The trace {name} cannot be read: {error}.", "Give a CSV file.") from error
        if not rows or "device" not in rows[0]:
            raise ShoalError(
                "no-data", f"The trace {name} has no column `device`.", "Begin it with a line of column names."
            )
        by_round = "round" in rows[0]
        profiles: dict[tuple[int, int], Profile] = {}
        there = np.ones((rounds if by_round else 1, devices), dtype=bool)
        for line, row in enumerate(rows, 2):
            device, round = whole(row, "device", name, line), whole(row, "round", name, line) if by_round else 0
            given = {key: number(row, key, name, line) for key in NUMBERS if row.get(key)}
            profiles[device, round] = Profile(**given)
            if device < devices and round < len(there) and row.get("available"):
                there[round, device] = number(row, "available", name, line) > 0
        for round in range(len(there)):
            for device in range(devices):
                if (device, round) not in profiles:
                    what = f"device {device} in round {round}" if by_round else f"device {device}"
                    advice = f"The run has {devices} devices and {rounds} rounds: give a row for each, or run less."
                    raise ShoalError("no-data", f"The trace {name} has no row for {what}.", advice)
        return cls(profiles, None if there.all() else there, by_round)


def whole(row: dict, key: str, name: str, line: int) -> int:
    text = row.get(key) or ""
    if not text.strip().isdecimal():
        raise ShoalError(
            "no-data", f"{key} in line {line} of {name} is {text[:40]!r}.", "It must be a number from 0 up."
        )
    return int(text)


def number(row: dict, key: str, name: str, line: int) -> float:
    try:
        value = float(row[key])
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0 or (key in ("macs", "down", "up") and value == 0):
        raise ShoalError(
            "no-data", f"{key} in line {line} of {name} is {row[key][:40]!r}.", "It must be a positive number."
        )
    return value
