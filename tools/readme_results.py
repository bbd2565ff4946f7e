"""The table and the picture of README.md that say what methods gain and what they cost, from the ledger."""

from dataclasses import dataclass
from statistics import mean

from ledger import format_interval, group_by_method
from markers import format_table
from result_tables import FEDDH_01, FEDDUM, FEDDUMAP, FLAT_MINIMA, FLAT_MINIMA_TUNED, NAMES, SCAFFOLD

from shoal.reproduce.ledger import LedgerRun

LENET = "LeNet, Dirichlet 0.1"
CNN = "CNN, two labels a device"


@dataclass(frozen=True)
class GainLine:
    """One line: a method of a file, and the file whose FedAvg it is compared with."""

    setting: str
    file: str
    method: str
    base: str
    remark: str = ""


GAINS = (
    GainLine(LENET, FLAT_MINIMA, "fedavg", FLAT_MINIMA),
    GainLine(LENET, FLAT_MINIMA, "ema", FLAT_MINIMA, "a running mean of the models"),
    GainLine(LENET, FLAT_MINIMA, "fedlc+ema", FLAT_MINIMA, "likewise, and rare classes have a larger margin"),
    GainLine(LENET, FEDDH_01, "feddh", FEDDH_01, "weighs devices by how uneven they are"),
    GainLine(LENET, SCAFFOLD, "scaffold", SCAFFOLD, "takes drift out of local steps; rate 0.03"),
    GainLine(LENET, SCAFFOLD, "fedprox", SCAFFOLD, "stays near the model received; rate 0.03"),
    GainLine(
        LENET,
        FLAT_MINIMA_TUNED,
        "fedsam(rho=0.01)",
        FLAT_MINIMA,
        "seeks flat minima, two passes a step",
    ),
    GainLine(CNN, FEDDUM, "fedavg", FEDDUM),
    GainLine(CNN, FEDDUM, "feddum", FEDDUM, "trains on 4,000 images of the server, too"),
    GainLine(CNN, FEDDUMAP, "feddumap", FEDDUM, "and prunes filters in round 30"),
)


def show_gains() -> str:
    """Accuracy beside that of FedAvg in the same round, and bytes and work of devices as multiples of FedAvg's."""
    rows = []
    for line in GAINS:
        runs, base = group_by_method(line.file)[line.method], group_by_method(line.base)["fedavg"]
        until = min(len(run.rows) for run in (*runs, *base))
        values, level = ([run.mean_accuracy(until) for run in group] for group in (runs, base))
        gaps = [a - b for a, b in zip(values, level)]
        own = line.method == "fedavg"
        sent = sum_columns(runs, until, "bytes_down", "bytes_up") / sum_columns(base, until, "bytes_down", "bytes_up")
        work = sum_columns(runs, until, "macs_work") / sum_columns(base, until, "macs_work")
        name = NAMES[line.method] + (f": {line.remark}" if line.remark else "")
        cells = [line.setting, name, str(until), format_interval(values), "" if own else format_interval(gaps, "+")]
        rows.append([*cells, f"{sent:.2f}", f"{work:.2f}"])
    heads = ["setting", "method", "rounds", "accuracy", "minus FedAvg", "bytes, FedAvg 1", "work of devices, FedAvg 1"]
    return format_table(heads, rows, numbers_from=2)


def sum_columns(runs: list[LedgerRun], until: int, *columns: str) -> float:
    """The sum of columns until a round, the mean over runs."""
    return mean(sum(row[column] for row in run.rows[:until] for column in columns) for run in runs)
