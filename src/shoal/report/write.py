"""Reports of runs: one picture of a comparison, or a page with everything."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.compare.comparison import Comparison
from shoal.report.facts import collect_facts
from shoal.report.page import read_budgets, read_groups, render_page
from shoal.report.plots import (
    COLOURS,
    draw_classes,
    draw_curves,
    draw_devices,
    draw_split,
    draw_stacks,
    format_label,
    open_canvas,
    pick_line_style,
    require_matplotlib,
)
from shoal.runs.history import History
from shoal.storage.files import write_bytes

__all__ = ["COLOURS", "draw_comparison", "require_matplotlib", "write_report"]


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """One page about runs and comparisons, and its pictures as PNG files in a folder beside it; what was written."""
    require_matplotlib()
    page = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    groups = read_groups(folders)
    facts = collect_facts(groups, read_budgets(folders))
    pictures = page.with_name(f"{page.stem}-pictures")
    written = draw_all(facts, pictures)
    write_bytes(page, render_page(groups, facts, pictures.name).encode())
    return [page, *written]


def draw_all(facts: dict[str, Any], folder: Path) -> list[Path]:
    """Every picture of a page; what the runs do not tell is left out."""
    groups, written = facts["groups"], []

    def add_picture(name: str) -> Path:
        written.append(folder / f"{name}.png")
        return written[-1]

    for metric in (*facts["metrics"], *facts["told"]):
        targets = facts["targets"] if metric == facts["headline"] else ()
        draw_curves(groups, metric, facts["about"][metric]["title"], targets, add_picture(metric))
    for number, split in enumerate(facts["splits"]):
        draw_split(split, add_picture("split" if number == 0 else f"split-{number + 1}"))
    for what in ("bytes", "seconds"):
        draw_stacks(groups, what, add_picture(what))
    if any(group["devices"] for group in groups):
        draw_devices(groups, add_picture("devices"))
    if any(group["classes"] for group in groups):
        draw_classes(groups, add_picture("classes"))
    return written


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """The headline against rounds and against what was sent: the mean over seeds, and the band they lie in."""
    metric = comparison.metrics.get(comparison.headline)
    title = metric.title if metric else comparison.headline
    with open_canvas(path, 1, 2, (11, 4.2), sharey=True) as (_, panels):
        for number, (method, results) in enumerate(comparison.results.items()):
            look = pick_line_style(number)
            for panel, column in zip(panels, ("rounds", "megabytes")):
                x, low, middle, high = average_curve([r.history for r in results], column)
                panel.plot(x, middle, label=format_label(method), linewidth=1.8, **look)
                if len(results) > 1:
                    panel.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
        for panel, cost_title in zip(panels, ("rounds", "megabytes sent, both ways")):
            panel.set_xlabel(cost_title)
            panel.set_xlim(left=0)
            panel.grid(alpha=0.25)
            if comparison.target:
                panel.axhline(comparison.target, color="#777777", linewidth=1, linestyle=(0, (4, 3)))
        seeds = max(len(results) for results in comparison.results.values())
        panels[0].set_ylabel(title + (f", mean and range of {seeds} seeds" if seeds > 1 else ""))
        panels[1].legend(loc="lower right", frameon=False)


def average_curve(histories: list[History], column: str) -> tuple[Any, Any, Any, Any]:
    """x, and the lowest, mean and highest headline over seeds at the rounds that all of them evaluated."""
    headline = histories[0].headline
    rounds = [r for r in range(min(map(len, histories))) if all(h.rows[r].get(headline) is not None for h in histories)]
    y = np.array([[h.rows[r][headline] for r in rounds] for h in histories])
    if column == "rounds":
        x = np.array(rounds) + 1
    else:
        sent = [np.cumsum([row["bytes_down"] + row["bytes_up"] for row in h.rows]) for h in histories]
        x = np.mean([s[rounds] for s in sent], axis=0) / 1e6
    return x, y.min(0), y.mean(0), y.max(0)
