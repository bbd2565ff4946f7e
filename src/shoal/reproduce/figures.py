"""Figures of a table: the published value, the measured one over seeds, and the gap between them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from shoal.core.errors import ShoalError
from shoal.reproduce.intervals import compute_interval
from shoal.reproduce.metric_readers import (
    BEST_OWN_TESTS,
    MEAN_OF_LIST,
    NEVER,
    OWN_TESTS,
    TIME,
    Value,
    find_reader,
)
from shoal.reproduce.reading import PLAIN, Reading
from shoal.reproduce.table import PaperTable, TableColumn, TableRow
from shoal.runs.history import History

PUBLISHED = Path(__file__).with_name("published.csv")
ROUNDS = "rounds_to_"
DEVIATION = "_std"
"""Behind a metric: its deviation over seeds."""
ALONE = ("acc_uniform_test_pct", "acc_client_tests_pct", "local_model_risk", "KL_P_Q")
"""Metrics of a paper that says what models are worth, and nothing of what they cost."""
ERRORS = ("local_model_risk", "KL_P_Q")
"""Those of them of which less is better."""


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
    interval: float | None = None
    """Half of the 95 % interval of the mean over seeds."""

    @property
    def gap(self) -> float | None:
        """Measured minus published, where both are numbers."""
        if isinstance(self.measured, float) and isinstance(self.published, float):
            return self.measured - self.published
        return None


@cache
def read_published() -> tuple[dict[str, str], ...]:
    """Every published figure: paper, table, method, dataset, model, setting, metric, value."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def find_published(table: PaperTable, column: TableColumn, row: TableRow) -> dict[str, Value]:
    """What the paper says about a cell, by metric; None where it has the metric of other methods only."""
    place = {"paper": table.paper, "table": row.table or table.table, **column.where}
    values: dict[str, Value] = {}
    for line in read_published() if column.where else ():
        if any(line[key] != value for key, value in place.items()):
            continue
        if line["method"] != row.method:
            values.setdefault(line["metric"], None)
            continue
        if values.get(line["metric"]) is not None:
            problem = f"published.csv has several figures for {row.method} in the column {column.name}."
            raise ShoalError("bad-recipe", problem, "Give dataset, model and setting under `where`.")
        values[line["metric"]] = find_reader(line["metric"])[0].parse(line["value"])
    return values | {metric: float(value) for metric, value in row.published.get(column.name, {}).items()}


def refuse_unmatched_columns(table: PaperTable) -> None:
    """A column that says where its figures are, and no figure is there, is a slip of the pen."""
    for column in table.columns:
        told = (value for row in table.rows for value in find_published(table, column, row).values())
        if column.where and all(value is None for value in told):
            where = ", ".join(f"{key} {value!r}" for key, value in column.where.items())
            problem = f"published.csv has nothing of {table.paper} {table.table} with {where} for any row."
            raise ShoalError("bad-recipe", problem, f"Correct `where` of the column {column.name}, or leave it out.")


def make_figures(
    column: TableColumn,
    row: TableRow,
    published: Mapping[str, Value],
    runs: Sequence[History] | None = None,
    target: float = 0.0,
    reading: Reading = PLAIN,
) -> list[Figure]:
    """The figures of a cell: those that are always measured, then what else was published.

    A published deviation has nothing beside it where fewer than two seeds ran, and is left out.
    """
    if runs is None and all(value is None for value in published.values()):
        return []
    figures, several = [], len(runs or ()) > 1
    published = {**published, **derive_published_rounds(published, reading)}
    defaults = list_default_metrics(published, runs, target) if runs else []
    defaults += [f"{ROUNDS}{target:g}"] if runs and target and reading.clock else []
    for metric in dict.fromkeys((*defaults, *published)):
        if metric.endswith(DEVIATION) and not several:
            continue
        value, spread, reached = measure_metric(metric, runs or (), reading)
        note, seeds = row.missing or ("" if runs else "not run"), len(runs or ())
        interval = compute_interval(read_seeds(metric, runs or (), reading))
        told = published.get(metric)
        figures.append(Figure(column.name, row.method, metric, told, value, spread, seeds, reached, note, interval))
    return figures


def derive_published_rounds(published: Mapping[str, Value], reading: Reading) -> dict[str, Value]:
    """Published seconds as rounds, where the authors' seconds are a constant times rounds."""
    if reading.clock is None:
        return {}
    times = {metric: value for metric, value in published.items() if metric.startswith(TIME)}
    rounds: dict[str, Value] = {
        metric: reading.clock.count_rounds(value) if isinstance(value, float) else value
        for metric, value in times.items()
    }
    return {metric.replace(TIME, ROUNDS, 1): value for metric, value in rounds.items()}


def make_figures_of_list(
    column: TableColumn,
    row: TableRow,
    published: Mapping[str, Value],
    groups: Sequence[Sequence[History]],
    target: float,
    reading: Reading,
) -> list[Figure]:
    """The figures of the setting with the best accuracy, which is chosen by test data, and the mean of all settings.

    `groups` are the seeds of each setting.
    """
    first = list_default_metrics(published, groups[0], target)[0]
    accuracy = "acc" if first in ERRORS else first
    means = [measure_metric(accuracy, runs, reading)[0] for runs in groups]
    known = [value for value in means if isinstance(value, float)]
    best = means.index(max(known)) if known else 0
    note = f"the best of {len(groups)} by test accuracy: {row.list_choices(column)[best]}"
    figures = make_figures(column, row, published, groups[best], target, reading)
    every = Figure(column.name, row.method, MEAN_OF_LIST, None, mean(known) if known else None, seeds=len(groups[0]))
    return [replace(f, note=note) for f in (*figures[:1], replace(every, reached=len(known)), *figures[1:])]


def list_default_metrics(published: Mapping[str, Value], runs: Sequence[History], target: float) -> list[str]:
    """The metrics of every cell: accuracy as its paper has it, seconds to the target, what a device had to do.

    Where a run looked at the three likeliest classes, accuracy and target are about those. Where devices test on
    samples of their own, that stands beside the accuracy, and before it in a table that is about it. A paper that
    counts what is uploaded is not about operations, and one that counts neither is about neither.
    """
    third = all(history.last("top3") is not None for history in runs)
    percent = any(metric.startswith(("acc_pct", "best_acc_pct", BEST_OWN_TESTS)) for metric in published)
    own = list(OWN_TESTS) if any(history.last("personal_mean") is not None for history in runs) else []
    plain = "acc_pct" if percent else "acc"
    accuracy = "top3_acc_pct" if third else "top1_acc_pct" if "top1_acc_pct" in published else plain
    aim = [f"{TIME}{'top3_' if third else ''}{target:g}"] if target else []
    alone = [metric for metric in ALONE if metric in published]
    if alone:
        return [*alone, *aim]
    cost = next((metric for metric in ("upload_size", "bandwidth_GB") if metric in published), "mflops")
    judged = [*own, accuracy] if BEST_OWN_TESTS in published else [accuracy, *own]
    return [*judged, *aim, cost]


def measure_metric(metric: str, runs: Sequence[History], reading: Reading = PLAIN) -> tuple[Value, float | None, int]:
    """The mean over seeds, its deviation, and how many had a value; None for what shoal does not measure."""
    if metric.endswith(DEVIATION):
        _, spread, reached = measure_metric(metric.removesuffix(DEVIATION), runs, reading)
        return spread, None, reached
    values = read_seeds(metric, runs, reading)
    if not values:
        return (NEVER if runs and find_reader(metric)[0].has_target else None), None, 0
    return float(mean(values)), stdev(values) if len(values) > 1 else None, len(values)


def read_seeds(metric: str, runs: Sequence[History], reading: Reading) -> list[float]:
    """The value of each seed that has one."""
    reader, rest = find_reader(metric)
    return [value for history in runs if (value := reader.read(history, rest, reading)) is not None]
