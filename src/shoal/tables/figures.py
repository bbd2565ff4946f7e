"""Figures: what a paper published, what was measured, and the gap between them."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from statistics import mean, stdev

from shoal.core.errors import ShoalError
from shoal.history import History
from shoal.tables.table import Column, Row, Table

PUBLISHED = Path(__file__).with_name("published.csv")
NEVER = "never"
"""What stands in place of seconds to an accuracy that was never reached."""
TIME = "time_s_to_"

Value = float | str | None


@dataclass(frozen=True)
class Figure:
    """One number of a table, under the name of its metric in published.csv."""

    column: str
    method: str
    metric: str
    published: Value = None
    measured: Value = None
    spread: float | None = None
    """The deviation over seeds."""
    seeds: int = 0
    reached: int = 0
    """How many of the seeds have a value; fewer than all where a target was not always reached."""
    note: str = ""

    @property
    def gap(self) -> float | None:
        """Measured minus published, where both are numbers."""
        if isinstance(self.measured, float) and isinstance(self.published, float):
            return self.measured - self.published
        return None


@cache
def all_published() -> tuple[dict[str, str], ...]:
    """Every published figure: paper, table, method, dataset, model, setting, metric, value."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def published(table: Table, column: Column, row: Row) -> dict[str, Value]:
    """What the paper says about a cell, by metric."""
    place = {"paper": table.paper, "table": row.table or table.table, "method": row.method, **column.where}
    found: dict[str, Value] = {}
    for line in all_published() if column.where else ():
        if all(line[key] == value for key, value in place.items()):
            if line["metric"] in found:
                problem = f"published.csv has several figures for {row.method} in the column {column.name}."
                raise ShoalError("bad-recipe", problem, "Give dataset, model and setting under `where`.")
            found[line["metric"]] = value_of(line["value"])
    return found | {metric: float(value) for metric, value in row.published.get(column.name, {}).items()}


def refuse_nowhere(table: Table) -> None:
    """A column that says where its figures are, and no figure is there, is a slip of the pen."""
    for column in table.columns:
        if column.where and not any(published(table, column, row) for row in table.rows):
            where = ", ".join(f"{key} {value!r}" for key, value in column.where.items())
            problem = f"published.csv has nothing of {table.paper} {table.table} with {where} for any row."
            raise ShoalError("bad-recipe", problem, f"Correct `where` of the column {column.name}, or leave it out.")


def value_of(text: str) -> Value:
    """A number, or a text such as 531KB as it stands; papers write NaN where a target was never reached."""
    try:
        value = float(text)
    except ValueError:
        return text
    return NEVER if isnan(value) else value if isfinite(value) else text


def figures(
    column: Column, row: Row, told: dict[str, Value], runs: Sequence[History] | None = None, target: float = 0.0
) -> list[Figure]:
    """The figures of a cell: those that are always measured, then what else was published."""
    always = ["acc", *([f"{TIME}{target:g}"] if target else []), "mflops"]
    if runs is None and not told:
        return []
    own = []
    for metric in dict.fromkeys(always if runs else ()) | dict.fromkeys(told):
        value, spread, reached = measured(metric, runs or ())
        note, seeds = row.missing or ("" if runs else "not run"), len(runs or ())
        own.append(Figure(column.name, row.method, metric, told.get(metric), value, spread, seeds, reached, note))
    return own


def measured(metric: str, runs: Sequence[History]) -> tuple[Value, float | None, int]:
    """The mean over seeds, its deviation, and how many had a value; None for what shoal does not measure."""
    values = [value for history in runs if (value := one(metric, history)) is not None]
    if not values:
        return (NEVER if runs and metric.startswith(TIME) else None), None, 0
    return float(mean(values)), stdev(values) if len(values) > 1 else None, len(values)


def one(metric: str, history: History) -> float | None:
    """A metric of one run: end accuracy, simulated seconds to a target, millions of forward operations."""
    if metric == "acc":
        return history.last("accuracy")
    if metric == "mflops":
        counts = [macs for macs in history["macs_forward"] if macs]
        return mean(counts) / 1e6 if counts else None
    if metric.startswith(TIME):
        try:
            cost = history.to_target(float(metric.removeprefix(TIME)))
        except ValueError:
            return None
        return float(cost["sim_seconds"]) if cost else None
    return None
