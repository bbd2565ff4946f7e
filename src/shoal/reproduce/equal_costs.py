"""Methods of a column side by side: the paired difference to FedAvg, accuracy at equal rounds, seconds and bytes."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev

from shoal.reproduce.figures import Figure, read_seeds
from shoal.reproduce.intervals import compute_interval
from shoal.reproduce.metric_readers import EQUAL, MINUS_FEDAVG, cut_at_budget
from shoal.reproduce.reading import Reading
from shoal.runs.history import History

BASELINE = "FedAvg"
COSTS: dict[str, tuple[str, ...]] = {"rounds": (), "s": ("sim_seconds",), "bytes": ("bytes_down", "bytes_up")}
"""What is made equal: columns that are added up, or the rounds themselves."""


def compare_methods(column: str, metric: str, runs: Mapping[str, Sequence[History]], reading: Reading) -> list[Figure]:
    """The figures of methods that ran in a column, by a metric such as `acc`; `runs` are the seeds of each.

    A budget is what the cheapest method spent with the same seed, so that every method is read where that one ends.
    """
    if len(runs) < 2:
        return []
    figures = []
    for method, histories in runs.items():
        if method != BASELINE and len(runs.get(BASELINE, ())) == len(histories):
            pairs = [read_seeds(metric, pair, reading) for pair in zip(histories, runs[BASELINE])]
            differences = [pair[0] - pair[1] for pair in pairs if len(pair) == 2]
            figures.append(summarise_seeds(column, method, MINUS_FEDAVG, differences))
        for cost in COSTS:
            budgets = find_smallest_costs(runs, cost)
            cut = [cut_at_cost(history, budget, cost) for history, budget in zip(histories, budgets)]
            figures.append(summarise_seeds(column, method, f"{EQUAL}{cost}", read_seeds(metric, cut, reading)))
    return [figure for figure in figures if figure.measured is not None]


def find_smallest_costs(runs: Mapping[str, Sequence[History]], cost: str) -> list[float]:
    """By seed, the least that any method spent in all; one that spent nothing does not count."""
    measure: Callable[[History], float] = (
        (lambda history: history.total(*COSTS[cost])) if COSTS[cost] else (lambda history: float(len(history)))
    )
    spent = [[measure(history) for history in histories] for histories in runs.values()]
    return [min((own for own in seeds if own), default=0.0) for seeds in zip(*spent)]


def cut_at_cost(history: History, budget: float, cost: str) -> History:
    return cut_at_budget(history, budget, *COSTS[cost]) if COSTS[cost] else history.cut(int(budget))


def summarise_seeds(column: str, method: str, metric: str, values: list[float]) -> Figure:
    measured = float(mean(values)) if values else None
    spread = stdev(values) if len(values) > 1 else None
    count = len(values)
    return Figure(column, method, metric, None, measured, spread, count, count, "", compute_interval(values))
