"""The metrics of published tables: how each is read off a history, parsed from published.csv, and formatted."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, isnan, log10
from statistics import mean

from shoal.core.types import SERVER
from shoal.runs.history import History

NEVER = "never"
"""What stands in place of seconds to an accuracy that was never reached."""
TIME = "time_s_to_"
"""Behind it stands an accuracy as 0.54, or as top3_0.31 one of the three likeliest."""
GB = 2**30
"""Bytes of a GB of FedBR: its traffic is whole rounds of its model only so."""

BLOCK_TRAFFIC = ("fedbr.bytes_down_by_blocks", "bytes_down_by_blocks")
"""Columns of the traffic of blocks counted alike; the second is that of version 0.1."""

Value = float | str | None


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
            return history.cut(at + 1)
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
    return ("bytes_up", next((c for c in BLOCK_TRAFFIC if history.last(c) is not None), "bytes_down"))


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
        found = history.cut(sum(row["round"] < budget for row in history.rows)).last("accuracy")
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
