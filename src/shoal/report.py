"""Pictures of runs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shoal.compare import Comparison
from shoal.core.errors import ShoalError
from shoal.files import disk_errors
from shoal.history import History

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D3A9B", "#222222")
"""Distinguishable with any colour vision (after Okabe and Ito)."""


def need_plotting() -> None:
    """Say what is missing before anything is computed, not after."""
    if find_spec("matplotlib") is None:
        raise ShoalError("missing-extra", "matplotlib is not installed.", "Run: pip install 'shoal[plot]'.")


def draw(comparison: Comparison, path: Path) -> None:
    """Accuracy against rounds and against what was sent: the mean over seeds, and the band they lie in."""
    need_plotting()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
        for number, (method, results) in enumerate(comparison.results.items()):
            colour = COLOURS[number % len(COLOURS)]
            line = ("-", "--", ":")[number // len(COLOURS) % 3]
            for panel, column in zip(panels, ("rounds", "megabytes")):
                x, low, middle, high = curve([r.history for r in results], column)
                panel.plot(x, middle, line, color=colour, label=method, linewidth=1.8)
                if len(results) > 1:
                    panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        for panel, title in zip(panels, ("rounds", "megabytes sent, both ways")):
            panel.set_xlabel(title)
            panel.set_xlim(left=0)
            panel.grid(alpha=0.25)
            if comparison.target:
                panel.axhline(comparison.target, color="#777777", linewidth=1, linestyle=(0, (4, 3)))
        seeds = max(len(results) for results in comparison.results.values())
        panels[0].set_ylabel("test accuracy" + (f", mean and range of {seeds} seeds" if seeds > 1 else ""))
        panels[1].legend(loc="lower right", frameon=False)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=140)
        pyplot.close(figure)


def curve(histories: list[History], column: str) -> tuple[Any, Any, Any, Any]:
    """x, and the lowest, mean and highest accuracy over seeds at the rounds that all of them evaluated."""
    rounds = [r for r in range(min(map(len, histories))) if all(h.rows[r]["accuracy"] is not None for h in histories)]
    y = np.array([[h.rows[r]["accuracy"] for r in rounds] for h in histories])
    if column == "rounds":
        x = np.array(rounds) + 1
    else:
        sent = [np.cumsum([row["bytes_down"] + row["bytes_up"] for row in h.rows]) for h in histories]
        x = np.mean([s[rounds] for s in sent], axis=0) / 1e6
    return x, y.min(0), y.mean(0), y.max(0)
