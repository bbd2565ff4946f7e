"""Curves of runs: a metric over rounds or over what was spent, as numbers and on axes of matplotlib."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import unknown_name_error
from shoal.core.metric import find_metric
from shoal.display.curve_style import COSTS, format_axis_title, format_label, pick_line_style
from shoal.runs.history import History

SPENT_COLUMNS = {"seconds": ("sim_seconds",), "bytes": ("bytes_down", "bytes_up"), "macs": ("macs_work",)}
"""What is added up over rounds, by the name of a cost."""


class SeedCurve(NamedTuple):
    """A metric at the rounds that all seeds evaluated: the cost until then, and the lowest, mean and highest value."""

    x: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray


def average_curve(histories: Sequence[History], cost: str = "rounds", column: str = "") -> SeedCurve:
    """The curve of runs that differ in their seeds; costs are means, in the units in which they are drawn."""
    column = column or histories[0].headline
    rows = range(min(map(len, histories)))
    rounds = [r for r in rows if all(isinstance(h.rows[r].get(column), (int, float)) for h in histories)]
    y = np.array([[h.rows[r][column] for r in rounds] for h in histories], dtype=float)
    if cost == "rounds":
        x = np.array(rounds, dtype=float) + 1
    else:
        spent = [np.cumsum([sum(row.get(c) or 0 for c in SPENT_COLUMNS[cost]) for row in h.rows]) for h in histories]
        x = np.mean([s[rounds] for s in spent], axis=0) / COSTS[cost][1]
    return SeedCurve(x, y.min(0), y.mean(0), y.max(0))


def draw_histories(
    ax: Any, runs: Mapping[str, Sequence[History]], cost: str = "rounds", column: str = "", target: float = 0.0
) -> Any:
    """Draw a metric (the headline unless `column` names one) of every method: the mean over seeds and their band."""
    histories = [history for seeds in runs.values() for history in seeds]
    column = column or next((h.headline for h in histories), "accuracy")
    if cost not in COSTS:
        raise unknown_name_error("cost to plot against", cost, COSTS)
    columns = dict.fromkeys(key for h in histories for row in h.rows for key, v in row.items() if is_drawable(v))
    if column not in columns and histories:
        raise unknown_name_error("column", column, columns)
    for number, (label, seeds) in enumerate(runs.items()):
        if not any(row.get(column) is not None for h in seeds for row in h.rows):
            continue
        curve, look = average_curve(seeds, cost, column), pick_line_style(number)
        ax.plot(curve.x, curve.mean, label=format_label(label), linewidth=1.8, **look)
        if len(seeds) > 1:
            ax.fill_between(curve.x, curve.low, curve.high, color=look["color"], alpha=0.15, linewidth=0)
    metrics = {name: metric for h in histories for name, metric in h.metrics.items()}
    metric, seeds = find_metric(column, metrics), max((len(s) for s in runs.values()), default=1)
    title = metric.title if metric else column
    ax.set_xlabel(COSTS[cost][0])
    ax.set_ylabel(format_axis_title(title))
    ax.set_xlim(left=0)
    if cost == "rounds":
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    if target:
        ax.axhline(target, color="#777777", linewidth=1, linestyle=(0, (4, 3)))
    if ax.get_legend_handles_labels()[0]:
        note = f"mean and range of {seeds} seeds" if seeds > 1 else None
        ax.legend(frameon=False, fontsize=9, title=note, title_fontsize=8, alignment="left")
    return ax


def is_drawable(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
