"""Reports of runs: one picture of a comparison, or a page with everything."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.compare.comparison import Comparison
from shoal.core.errors import ShoalError
from shoal.display.curve_style import COLOURS, require_matplotlib
from shoal.report.facts import collect_facts
from shoal.report.page import read_budgets, read_groups, render_page
from shoal.report.plots import (
    draw_classes,
    draw_curves,
    draw_devices,
    draw_split,
    draw_stacks,
    open_canvas,
)
from shoal.storage.files import write_bytes

__all__ = ["COLOURS", "draw_comparison", "require_matplotlib", "write_report"]


PAGE_SUFFIXES = (".html", ".htm")


def write_report(folders: Sequence[Path], out: Path) -> list[Path]:
    """One page about runs and comparisons, and its pictures as PNG files in a folder beside it; what was written."""
    require_matplotlib()
    if out.suffix and not out.is_dir() and out.suffix.lower() not in PAGE_SUFFIXES:
        problem = f"The report is a page in HTML, and {out} ends with {out.suffix}."
        raise ShoalError("bad-value", problem, f"Write {out.with_suffix('.html')}, or the name of a folder.")
    page = out if out.suffix.lower() in PAGE_SUFFIXES else out / "report.html"
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
    with open_canvas(path, 1, 2, (11, 4.2), sharey=True) as (_, panels):
        for panel, cost in zip(panels, ("rounds", "bytes")):
            comparison.plot(cost, ax=panel)
        panels[0].get_legend().remove()
        panels[1].set_ylabel("")
