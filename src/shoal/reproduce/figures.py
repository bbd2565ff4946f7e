"""Figures: what a paper published, what was measured, and the gap between them."""

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, isnan, log10
from pathlib import Path
from statistics import mean, stdev

from shoal.core.errors import ShoalError
from shoal.core.types import SERVER
from shoal.reproduce.table import PaperTable, TableColumn, TableRow
from shoal.runs.history import History

PUBLISHED = Path(__file__).with_name("published.csv")
NEVER = "never"
"""What stands in place of seconds to an accuracy that was never reached."""
TIME = "time_s_to_"
"""Behind it stands an accuracy as 0.54, or as top3_0.31 one of the three likeliest."""
DEVIATION = "_std"
"""Behind a metric: its deviation over seeds."""
GB = 2**30
"""Bytes of a GB of FedBR: its traffic is whole rounds of its model only so."""
ALONE = ("acc_uniform_test_pct", "acc_client_tests_pct", "local_model_risk", "KL_P_Q")
"""Metrics of a paper that says what models are worth, and nothing of what they cost."""

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
def read_published() -> tuple[dict[str, str], ...]:
    """Every published figure: paper, table, method, dataset, model, setting, metric, value."""
    with open(PUBLISHED, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def find_published(table: PaperTable, column: TableColumn, row: TableRow) -> dict[str, Value]:
    """What the paper says about a cell, by metric; None where it has the metric of other methods only."""
    place = {"paper": table.paper, "table": row.table or table.table, **column.where}
    found: dict[str, Value] = {}
    for line in read_published() if column.where else ():
        if any(line[key] != value for key, value in place.items()):
            continue
        if line["method"] != row.method:
            found.setdefault(line["metric"], None)
            continue
        if found.get(line["metric"]) is not None:
            problem = f"published.csv has several figures for {row.method} in the column {column.name}."
            raise ShoalError("bad-recipe", problem, "Give dataset, model and setting under `where`.")
        found[line["metric"]] = find_reader(line["metric"])[0].parse(line["value"])
    return found | {metric: float(value) for metric, value in row.published.get(column.name, {}).items()}


def refuse_unmatched_columns(table: PaperTable) -> None:
    """A column that says where its figures are, and no figure is there, is a slip of the pen."""
    for column in table.columns:
        told = (value for row in table.rows for value in find_published(table, column, row).values())
        if column.where and all(value is None for value in told):
            where = ", ".join(f"{key} {value!r}" for key, value in column.where.items())
            problem = f"published.csv has nothing of {table.paper} {table.table} with {where} for any row."
            raise ShoalError("bad-recipe", problem, f"Correct `where` of the column {column.name}, or leave it out.")


def parse_published_value(text: str) -> Value:
    """A number, or a text as it stands; papers write NaN where a target was never reached."""
    try:
        value = float(text)
    except ValueError:
        return text
    return NEVER if isnan(value) else value if isfinite(value) else text


def parse_size(text: str) -> Value:
    """A size such as 531KB in bytes, by decimal units."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)B", text)
    return float(round(float(found[1]) * 1000 ** " KMG".index(found[2] or " "))) if found else text


def make_figures(
    column: TableColumn,
    row: TableRow,
    told: dict[str, Value],
    runs: Sequence[History] | None = None,
    target: float = 0.0,
) -> list[Figure]:
    """The figures of a cell: those that are always measured, then what else was published.

    A published deviation has nothing beside it where fewer than two seeds ran, and is left out.
    """
    if runs is None and all(value is None for value in told.values()):
        return []
    own, several = [], len(runs or ()) > 1
    for metric in dict.fromkeys(list_default_metrics(told, runs, target) if runs else ()) | dict.fromkeys(told):
        if metric.endswith(DEVIATION) and not several:
            continue
        value, spread, reached = measure_metric(metric, runs or ())
        note, seeds = row.missing or ("" if runs else "not run"), len(runs or ())
        own.append(Figure(column.name, row.method, metric, told.get(metric), value, spread, seeds, reached, note))
    return own


def list_default_metrics(told: dict[str, Value], runs: Sequence[History], target: float) -> list[str]:
    """The metrics of every cell: accuracy as its paper has it, seconds to the target, what a device had to do.

    Where a run looked at the three likeliest classes, accuracy and target are about those. A paper that counts what is
    uploaded is not about operations, and one that counts neither is about neither.
    """
    third = all(history.last("top3") is not None for history in runs)
    percent = any(metric.startswith("acc_pct") for metric in told)
    plain = "acc_pct" if percent else "acc"
    accuracy = "top3_acc_pct" if third else "top1_acc_pct" if "top1_acc_pct" in told else plain
    aim = [f"{TIME}{'top3_' if third else ''}{target:g}"] if target else []
    alone = [metric for metric in ALONE if metric in told]
    if alone:
        return [*alone, *aim]
    cost = next((metric for metric in ("upload_size", "bandwidth_GB") if metric in told), "mflops")
    return [accuracy, *aim, cost]


def measure_metric(metric: str, runs: Sequence[History]) -> tuple[Value, float | None, int]:
    """The mean over seeds, its deviation, and how many had a value; None for what shoal does not measure."""
    if metric.endswith(DEVIATION):
        _, spread, reached = measure_metric(metric.removesuffix(DEVIATION), runs)
        return spread, None, reached
    reader, rest = find_reader(metric)
    values = [value for history in runs if (value := reader.read(history, rest)) is not None]
    if not values:
        return (NEVER if runs and reader.has_target else None), None, 0
    return float(mean(values)), stdev(values) if len(values) > 1 else None, len(values)


# how each metric is read off a history; each of these is also given what stands behind the metric's name ------------
def make_last_reader(column: str, factor: float = 1.0) -> Callable[[History, str], float | None]:
    """The newest value of a column."""

    def read(history: History, rest: str) -> float | None:
        value = history.last(column)
        return None if value is None else value * factor

    return read


def read_forward_macs(history: History, rest: str) -> float | None:
    """Millions of forward operations of a sample."""
    counts = [macs for macs in history["macs_forward"] if macs]
    return mean(counts) / 1e6 if counts else None


def read_upload_bytes(history: History, rest: str) -> float | None:
    """Bytes that a device sent in a round that it took part in; what it tells of itself once, before, is no part."""
    once = sum((by or {}).get("up", {}).get("enrol", 0) for by in history["bytes_by"])
    asked = sum(device != SERVER for devices in history["devices"] for device in devices or ())
    return (history.total("bytes_up") - once) / asked if asked else None


def cut_at_target(history: History, rest: str) -> History | None:
    """The rounds until an accuracy, such as 0.54 or top3_0.31, was first reached."""
    kind, _, number = rest.rpartition("_")
    column = {"": "accuracy", "top3": "top3"}.get(kind)
    try:
        target = float(number)
    except ValueError:
        return None
    for at, row in enumerate(history.rows):
        if column and row.get(column) is not None and row[column] >= target:
            return History(history.rows[: at + 1])
    return None


def read_seconds_to_target(history: History, rest: str) -> float | None:
    """Simulated ones to a target."""
    rounds = cut_at_target(history, rest)
    return None if rounds is None else float(rounds.total("sim_seconds"))


def read_rounds_to_target(history: History, rest: str) -> float | None:
    found = cut_at_target(history, rest)
    return None if found is None else float(len(found))


def pick_traffic_columns(history: History) -> tuple[str, str]:
    """The columns of the traffic as a paper counts it: by blocks that are all of one size, where a run tells that."""
    by_blocks = history.last("bytes_down_by_blocks") is not None
    return ("bytes_up", "bytes_down_by_blocks" if by_blocks else "bytes_down")


def read_traffic(history: History, rest: str) -> float | None:
    """GB both ways, of all devices together."""
    return history.total(*pick_traffic_columns(history)) / GB


def read_traffic_to_target(history: History, rest: str) -> float | None:
    found = cut_at_target(history, rest)
    return None if found is None else read_traffic(found, "")


def read_accuracy_within(history: History, rest: str) -> float | None:
    """Per cent at the last evaluation within 70 rounds, 900 s or 50 GB."""
    number, _, unit = rest.partition(" ")
    try:
        budget = float(number)
    except ValueError:
        return None
    if unit == "rounds":
        found = History([row for row in history.rows if row["round"] < budget]).last("accuracy")
    elif unit == "s":
        found = history.accuracy_at_budget(budget, "sim_seconds")
    else:
        found = history.accuracy_at_budget(budget * GB, *pick_traffic_columns(history)) if unit == "GB" else None
    return None if found is None else 100 * found


def read_training_seconds(history: History, rest: str) -> float | None:
    """Simulated seconds that the last device of a round computed."""
    spent = [by["compute"] for by in history["seconds_by"] if by]
    return float(mean(spent)) if spent else None


# how each metric is shown; each of these is also given the sign that a gap wants, and the largest value beside it ----
def make_fixed_format(digits: int) -> Callable[[float, str, float], str]:
    """A number with so many digits behind the point."""
    return lambda value, sign, largest: f"{round(value, digits) + 0.0:{sign}.{digits}f}"


def format_short(value: float, sign: str, largest: float) -> str:
    """Digits behind the point only where there are few before it."""
    return make_fixed_format(0 if abs(value) >= 100 else 3)(value, sign, largest)


def format_decimal_size(value: float, sign: str, largest: float) -> str:
    """Bytes in the decimal unit of the largest."""
    power = min(int(log10(max(largest, 1.0))) // 3, 3)
    value /= 1000**power
    digits = 0 if not power or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:{sign}.{digits}f} {('B', 'KB', 'MB', 'GB')[power]}"


@dataclass(frozen=True)
class MetricReader:
    """A metric: how it is measured, and how it is shown."""

    read: Callable[[History, str], float | None]
    head: str
    """{} is what stands behind its name."""
    show: Callable[[float, str, float], str] = make_fixed_format(3)
    parse: Callable[[str], Value] = parse_published_value
    has_target: bool = False
    """Whether it is about a target, which may never be reached."""
    spread: bool = False
    """Whether the deviation over seeds is shown."""
    gap: str = "difference"
    """Or "per cent", or "" where there is none worth showing."""


READERS = {
    "acc": MetricReader(make_last_reader("accuracy"), "accuracy", spread=True),
    "acc_pct": MetricReader(make_last_reader("accuracy", 100), "accuracy %", make_fixed_format(2), spread=True),
    "acc_pct_within_": MetricReader(read_accuracy_within, "% within {}", make_fixed_format(2), spread=True),
    "top1_acc_pct": MetricReader(make_last_reader("accuracy", 100), "top-1 %", make_fixed_format(2), spread=True),
    "top3_acc_pct": MetricReader(make_last_reader("top3", 100), "top-3 %", make_fixed_format(2), spread=True),
    "acc_uniform_test_pct": MetricReader(
        make_last_reader("accuracy", 100), "accuracy %", make_fixed_format(2), spread=True
    ),
    "acc_client_tests_pct": MetricReader(
        make_last_reader("device_mean", 100), "device mean %", make_fixed_format(2), spread=True
    ),
    "local_model_risk": MetricReader(make_last_reader("local_risk"), "local risk", spread=True),
    "KL_P_Q": MetricReader(make_last_reader("class_kl"), "KL(P, Q)", make_fixed_format(2), spread=True),
    "rounds_to_": MetricReader(read_rounds_to_target, "rounds to {}", make_fixed_format(0), has_target=True),
    TIME: MetricReader(read_seconds_to_target, "s to {}", format_short, has_target=True, gap=""),
    "time_s_local": MetricReader(read_training_seconds, "s of training", format_short, gap=""),
    "GB_to_": MetricReader(read_traffic_to_target, "GB to {}", make_fixed_format(1), has_target=True, gap="per cent"),
    "bandwidth_GB": MetricReader(read_traffic, "GB", make_fixed_format(1), gap="per cent"),
    "mflops": MetricReader(read_forward_macs, "M MACs"),
    "upload_size": MetricReader(read_upload_bytes, "upload", format_decimal_size, parse_size, gap="per cent"),
}
"""What shoal measures, in the order in which it is shown; a name that ends in _ has a target behind it."""


def find_reader(metric: str) -> tuple[MetricReader, str]:
    """What reads a metric, and what stands behind its name there; one that is not measured is shown as published."""
    for name, reader in READERS.items():
        if metric == name or (name.endswith("_") and metric.startswith(name)):
            return reader, metric.removeprefix(name)
    return MetricReader(lambda history, rest: None, metric), ""
