"""The metrics of published tables: how each is read off a history, parsed from published.csv, and formatted."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, isnan, log10
from statistics import mean

from shoal.core.types import SERVER
from shoal.reproduce.reading import PLAIN, Reading
from shoal.runs.history import History

NEVER = "never"
"""What stands in place of seconds to an accuracy that was never reached."""
TIME = "time_s_to_"
"""Behind it stands an accuracy as 0.54, or as top3_0.31 one of the three likeliest."""
OWN_TESTS = ("own_tests_pct", "own_tests_mean_pct", "own_tests_worst_pct")
"""What devices get on their own test samples: over all samples, the mean over devices, the worst tenth of them."""
BEST_OWN_TESTS = "best_own_tests_pct"
"""The best round of the first of these."""
MEAN_OF_LIST = "mean_of_list"
"""Beside the best of a list of settings, which authors chose by test data: the mean accuracy of them all."""
MINUS_FEDAVG = "minus_FedAvg"
"""The mean over seeds of a method's accuracy minus that of FedAvg with the same seed."""
EQUAL = "at_equal_"
"""Behind it stands what is equal for all methods of a column: rounds, s or bytes."""
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


# how each metric is read off a history; each of these is also given what stands behind the metric's name, and how the
# protocol reads values, targets and seconds ---------------------------------------------------------------------------
def make_value_reader(column: str, factor: float = 1.0) -> Callable[[History, str, Reading], float | None]:
    """A column's value as the protocol reads it."""

    def read(history: History, rest: str, reading: Reading) -> float | None:
        value = reading.read_value(history, column)
        return None if value is None else value * factor

    return read


def read_best_round(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """The best round in per cent; nothing where the protocol picks none by test data."""
    return 100 * history.best if reading.best_round and history.best is not None else None


def read_best_own_tests(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """The best round over all samples that devices test on, in per cent; nothing where the protocol picks none."""
    values = [value for value in history["personal_pooled"] if value is not None]
    return 100 * max(values) if reading.best_round and values else None


def read_nothing(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """What is measured otherwise, or not at all."""
    return None


def read_forward_macs(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """Millions of forward operations of a sample."""
    counts = [macs for macs in history["macs_forward"] if macs]
    return mean(counts) / 1e6 if counts else None


def read_upload_bytes(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """Bytes that a device sent in a round that it took part in; what it tells of itself once, before, is no part.

    Histories of a ledger list neither: there every device that is asked is taken to answer, with all bytes.
    """
    once = sum((by or {}).get("up", {}).get("enrol", 0) for by in history["bytes_by"])
    if history.last("devices") is None:
        asked = reading.asked * len(history)
    else:
        asked = sum(device != SERVER for devices in history["devices"] for device in devices or ())
    return (history.total("bytes_up") - once) / asked if asked else None


def cut_at_target(history: History, rest: str, reading: Reading = PLAIN) -> History | None:
    """The rounds until an accuracy, such as 0.54 or top3_0.31, was first reached."""
    kind, _, number = rest.rpartition("_")
    column = {"": "accuracy", "top3": "top3"}.get(kind)
    try:
        target = float(number)
    except ValueError:
        return None
    return reading.cut_at_target(history, column, target) if column else None


def read_seconds_to_target(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """Simulated ones to a target, or as the authors count them."""
    rounds = cut_at_target(history, rest, reading)
    return None if rounds is None else reading.count_seconds(rounds)


def read_rounds_to_target(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    found = cut_at_target(history, rest, reading)
    return None if found is None else float(len(found))


def pick_traffic_columns(history: History) -> tuple[str, str]:
    """The columns of the traffic as a paper counts it: by blocks that are all of one size, where a run tells that."""
    return ("bytes_up", next((c for c in BLOCK_TRAFFIC if history.last(c) is not None), "bytes_down"))


def read_traffic(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """GB both ways, of all devices together."""
    return history.total(*pick_traffic_columns(history)) / GB


def read_traffic_to_target(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    found = cut_at_target(history, rest, reading)
    return None if found is None else read_traffic(found, "", reading)


def read_accuracy_within(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
    """Per cent within 70 rounds, 900 s or 50 GB."""
    number, _, unit = rest.partition(" ")
    try:
        budget = float(number)
    except ValueError:
        return None
    if unit == "rounds":
        found = history.cut(sum(row["round"] < budget for row in history.rows))
    elif unit == "s":
        found = cut_at_budget(history, budget, "sim_seconds")
    else:
        found = cut_at_budget(history, budget * GB, *pick_traffic_columns(history)) if unit == "GB" else None
    value = None if found is None else reading.read_value(found, "accuracy")
    return None if value is None else 100 * value


def cut_at_budget(history: History, budget: float, *columns: str) -> History:
    """The rounds until which these columns add up to no more than a budget."""
    spent, rounds = 0.0, 0
    for row in history.rows:
        spent += sum(row.get(column) or 0 for column in columns)
        if spent > budget:
            break
        rounds += 1
    return history.cut(rounds)


def read_training_seconds(history: History, rest: str, reading: Reading = PLAIN) -> float | None:
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

    read: Callable[[History, str, Reading], float | None]
    head: str
    """{} is what stands behind its name."""
    show: Callable[[float, str, float], str] = make_fixed_format(3)
    parse: Callable[[str], Value] = parse_published_value
    has_target: bool = False
    """Whether it is about a target, which may never be reached."""
    spread: bool = False
    """Whether the deviation over seeds is shown."""
    sign: str = ""
    """+ where a value above 0 is shown with it."""
    gap: str = "difference"
    """Or "per cent", or "" where there is none worth showing."""


READERS = {
    "acc": MetricReader(make_value_reader("accuracy"), "accuracy", spread=True),
    "acc_pct": MetricReader(make_value_reader("accuracy", 100), "accuracy %", make_fixed_format(2), spread=True),
    "acc_pct_within_": MetricReader(read_accuracy_within, "% within {}", make_fixed_format(2), spread=True),
    "top1_acc_pct": MetricReader(make_value_reader("accuracy", 100), "top-1 %", make_fixed_format(2), spread=True),
    "top3_acc_pct": MetricReader(make_value_reader("top3", 100), "top-3 %", make_fixed_format(2), spread=True),
    "acc_uniform_test_pct": MetricReader(
        make_value_reader("accuracy", 100), "accuracy %", make_fixed_format(2), spread=True
    ),
    "acc_client_tests_pct": MetricReader(
        make_value_reader("device_mean", 100), "device mean %", make_fixed_format(2), spread=True
    ),
    "local_model_risk": MetricReader(make_value_reader("local_risk"), "local risk", spread=True),
    "KL_P_Q": MetricReader(make_value_reader("class_kl"), "KL(P, Q)", make_fixed_format(2), spread=True),
    "best_acc_pct": MetricReader(read_best_round, "best round %", make_fixed_format(2), spread=True),
    "own_tests_pct": MetricReader(
        make_value_reader("personal_pooled", 100), "own tests %", make_fixed_format(2), spread=True
    ),
    "own_tests_mean_pct": MetricReader(
        make_value_reader("personal_mean", 100), "mean of devices %", make_fixed_format(2), spread=True
    ),
    "own_tests_worst_pct": MetricReader(
        make_value_reader("personal_worst", 100), "worst tenth %", make_fixed_format(2), spread=True
    ),
    BEST_OWN_TESTS: MetricReader(read_best_own_tests, "best round of own tests %", make_fixed_format(2), spread=True),
    MEAN_OF_LIST: MetricReader(read_nothing, "mean of list"),
    MINUS_FEDAVG: MetricReader(read_nothing, "minus FedAvg", spread=True, sign="+"),
    EQUAL: MetricReader(read_nothing, "equal {}", spread=True),
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
    return MetricReader(read_nothing, metric), ""
