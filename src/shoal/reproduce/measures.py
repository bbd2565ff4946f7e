"""What claims are about: how each measure is read off a run of the ledger, and where its published figure stands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from shoal.reproduce.ledger import LedgerRun
from shoal.reproduce.metric_readers import (
    Value,
    format_decimal_size,
    make_fixed_format,
    read_accuracy_within,
    read_forward_macs,
    read_traffic,
)
from shoal.runs.history import History

LAST_ROUNDS = 20


class CurveReading(Protocol):
    """How a protocol reads a curve: the value at its end, the rounds to a target, and their seconds."""

    def read_value(self, history: History, column: str) -> float | None: ...

    def cut_at_target(self, history: History, column: str, target: float) -> History | None: ...

    def count_seconds(self, history: History) -> float: ...


class LastRoundsReading:
    """Of runs from before the protocols: the mean of the last 20 rounds, the first look at a target, simulated time."""

    def read_value(self, history: History, column: str) -> float | None:
        values = [row[column] for row in history.rows[-LAST_ROUNDS:] if row.get(column) is not None]
        return mean(values) if values else None

    def cut_at_target(self, history: History, column: str, target: float) -> History | None:
        looks = ((at, row.get(column)) for at, row in enumerate(history.rows))
        return next((history.cut(at + 1) for at, value in looks if value is not None and value >= target), None)

    def count_seconds(self, history: History) -> float:
        return float(history.total("sim_seconds"))


@dataclass(frozen=True)
class MeasuredValue:
    """A value of one run; `complete` is False where a target was never reached, and the value is all that was spent."""

    value: float
    complete: bool = True


@dataclass(frozen=True)
class Measure:
    """One thing that can be compared: read off a run, published under the first of some metrics, shown with a unit."""

    read: Callable[[LedgerRun, float, CurveReading], MeasuredValue | None]
    metrics: tuple[str, ...]
    """Names in published.csv; one that ends in _ has a target behind it."""
    unit: str = "points"
    """points: differences of per cent; difference: of anything else; ratio, bytes: how many times as much."""
    digits: int = 2
    is_known_early: Callable[[LedgerRun], bool] | None = None
    """Whether a run that was broken off shows it; None: no such run does."""

    @property
    def is_ratio(self) -> bool:
        return self.unit in ("ratio", "bytes")

    def find_published(self, figures: Mapping[str, Value]) -> float | None:
        """The published figure, accuracies in per cent."""
        for metric, value in figures.items():
            fits = any(metric == name or (name.endswith("_") and metric.startswith(name)) for name in self.metrics)
            if fits and isinstance(value, float) and not metric.endswith("_std"):
                return 100 * value if metric == "acc" else value
        return None

    def format_value(self, value: float, sign: str = "") -> str:
        show = format_decimal_size if self.unit == "bytes" else make_fixed_format(self.digits)
        return show(value, sign, abs(value))


def read_curve_end(column: str, factor: float) -> Callable[[LedgerRun, float, CurveReading], MeasuredValue | None]:
    """The value at the end of a column's curve; top-3 in place of the accuracy where a run looked at that."""

    def read(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
        value = reading.read_value(run.history, pick_accuracy_column(run) if column == "accuracy" else column)
        return None if value is None else MeasuredValue(factor * value)

    return read


def pick_accuracy_column(run: LedgerRun) -> str:
    return "top3" if run.history.last("top3") is not None else "accuracy"


def read_seconds(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
    """Seconds to the target."""
    until = reading.cut_at_target(run.history, pick_accuracy_column(run), target)
    spent = reading.count_seconds(until or run.history)
    return MeasuredValue(spent, until is not None) if target and spent else None


def read_gigabytes(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
    """GB both ways to the target."""
    until = reading.cut_at_target(run.history, pick_accuracy_column(run), target)
    spent = read_traffic(until or run.history, "")
    return MeasuredValue(spent, until is not None) if target and spent else None


def read_within(limit: str) -> Callable[[LedgerRun, float, CurveReading], MeasuredValue | None]:
    """Per cent at the last evaluation within so many rounds, seconds or GB."""

    def read(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
        value = read_accuracy_within(run.history, limit)
        return None if value is None else MeasuredValue(value)

    return read


def read_macs(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
    value = read_forward_macs(run.history, "")
    return None if value is None else MeasuredValue(value)


def read_final_macs(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
    value = run.history.last("macs_forward")
    return MeasuredValue(value / 1e6) if value else None


def is_pruned(run: LedgerRun) -> bool:
    """Whether the model became smaller on the way, so that what it computes now is what it will at the end."""
    first, last = run.rows[0].get("macs_forward"), run.history.last("macs_forward")
    return bool(first and last) and last < first


def read_upload(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
    """Bytes of a device and round; every device that is asked is taken to answer."""
    return MeasuredValue(run.history.total("bytes_up") / (len(run.rows) * run.parsed_recipe.sample))


def read_total_traffic(run: LedgerRun, target: float, reading: CurveReading) -> MeasuredValue | None:
    value = read_traffic(run.history, "")
    return None if value is None else MeasuredValue(value)


ACCURACIES = ("acc", "acc_pct", "top1_acc_pct", "top3_acc_pct", "acc_uniform_test_pct")
MEASURES = {
    "accuracy": Measure(read_curve_end("accuracy", 100), ACCURACIES),
    "device accuracy": Measure(read_curve_end("device_mean", 100), ("acc_client_tests_pct",)),
    "within 70 rounds": Measure(read_within("70 rounds"), ("acc_pct_within_70 rounds",)),
    "within 900 s": Measure(read_within("900 s"), ("acc_pct_within_900 s",)),
    "within 50 GB": Measure(read_within("50 GB"), ("acc_pct_within_50 GB",)),
    "local risk": Measure(read_curve_end("local_risk", 1), ("local_model_risk",), "difference"),
    "MACs": Measure(read_macs, ("mflops",), "ratio", digits=3),
    "final MACs": Measure(read_final_macs, ("mflops",), "ratio", digits=3, is_known_early=is_pruned),
    "upload": Measure(read_upload, ("upload_size",), "bytes", is_known_early=lambda run: True),
    "time to target": Measure(read_seconds, ("time_s_to_",), "ratio", digits=0),
    "GB to target": Measure(read_gigabytes, ("GB_to_",), "ratio", digits=1),
    "traffic": Measure(read_total_traffic, ("bandwidth_GB",), "ratio", digits=1),
}
