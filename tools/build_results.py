"""Builds the tables and pictures of docs/results and of README.md from the ledger in results/.

    python tools/build_results.py            write what is between `<!-- generated: results NAME -->` and `<!-- end -->`
    python tools/build_results.py --check    change nothing; end with 1 where something is not what would be written

`make results` runs the first, the tests the second. Running it twice changes nothing: pictures are SVG without dates.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from ledger import group_by_method
from markers import ROOT, fill_sections, list_sections, write_changes
from method_results import METHOD_PICTURES, SECTION, add_sections, draw_page, find_experiments, write_section
from readme_results import show_gains
from result_tables import FEDDH_01, FEDDH_05, FLAT_MINIMA, LISTS, NAMES, SCAFFOLD, TABLES, list_feddum_runs
from svg_files import STYLE, plt, save_svg
from verdict_page import VERDICT_SECTIONS

from shoal.display.curve_style import COLOURS
from shoal.reproduce.ledger import LedgerRun

PREFIX = "results "
SMOOTH = 20
"""Rounds of the running mean that is drawn; single looks jump by several points."""


def draw_runs(axis, runs: Sequence[LedgerRun], label: str, colour: str, over_bytes: bool = False) -> None:
    """The running mean of the accuracy: that of each run thin, that of all of them thick."""
    curves = []
    for run in runs:
        rounds = range(SMOOTH, len(run.rows) + 1)
        x = [run.total_bytes(n) / 1e9 for n in rounds] if over_bytes else list(rounds)
        y = [run.mean_accuracy(n, SMOOTH) for n in rounds]
        axis.plot(x, y, color=colour, linewidth=0.5, alpha=0.5)
        curves.append((x, y))
    together = [mean(values) for values in zip(*(y for _, y in curves))]
    axis.plot(curves[0][0], together, color=colour, linewidth=1.8, label=label)


def draw_methods(axis, name: str, title: str, over_bytes: bool = False) -> None:
    for colour, (method, runs) in zip(COLOURS, group_by_method(name).items()):
        draw_runs(axis, runs, NAMES[method], colour, over_bytes)
    axis.set(title=title, xlabel="GB, both ways" if over_bytes else "rounds")
    axis.legend(frameon=False, loc="lower right")


def draw_feddh(axes) -> None:
    draw_methods(axes[0], FEDDH_05, "Dirichlet 0.5")
    draw_methods(axes[1], FEDDH_01, "Dirichlet 0.1")


def draw_scaffold(axes) -> None:
    draw_methods(axes[0], SCAFFOLD, "by rounds")
    draw_methods(axes[1], SCAFFOLD, "by bytes", over_bytes=True)


def draw_feddum(axes) -> None:
    for axis, over_bytes in zip(axes, (False, True)):
        for colour, method in zip(COLOURS, ("fedavg", "feddum", "feddumap")):
            runs = [run for run in list_feddum_runs() if run.method == method]
            draw_runs(axis, runs, NAMES[method], colour, over_bytes)
        axis.set(xlabel="GB, both ways" if over_bytes else "rounds")
        axis.legend(frameon=False, loc="lower right")


def draw_gains(axes) -> None:
    groups = group_by_method(FLAT_MINIMA)
    for colour, method in zip(COLOURS, ("fedavg", "ema")):
        draw_runs(axes[0], groups[method], NAMES[method].replace("`", ""), colour)
    axes[0].set(title="LeNet, Dirichlet 0.1: by rounds", xlabel="rounds")
    for colour, method in zip(COLOURS, ("fedavg", "feddum", "feddumap")):
        runs = [run for run in list_feddum_runs() if run.method == method]
        draw_runs(axes[1], runs, NAMES[method], colour, over_bytes=True)
    axes[1].set(title="CNN, two labels a device: by bytes", xlabel="GB, both ways")
    for axis in axes:
        axis.legend(frameon=False, loc="lower right")


PICTURES = {
    "gains.svg": draw_gains,
    "feddh-cifar10.svg": draw_feddh,
    "scaffold-cifar10.svg": draw_scaffold,
    "feddum-cifar10.svg": draw_feddum,
}


def draw_picture(name: str) -> str:
    """A picture of two panels side by side, as the text of an SVG file."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
        PICTURES[name](axes)
        axes[0].set_ylabel(f"accuracy in per cent, mean of {SMOOTH} rounds")
        return save_svg(figure)


def build() -> dict[Path, str]:
    """The pages with a section of the ledger and the pictures, as they must be."""
    sections = TABLES | VERDICT_SECTIONS | {"gains": show_gains}
    writers = {PREFIX + name: write for name, write in sections.items()}
    places = [ROOT / "README.md", ROOT / "results/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    writers |= {f"{SECTION} {name}": partial(write_section, name) for name in find_experiments()}
    pages = add_sections({place: place.read_text(encoding="utf-8") for place in places})
    absent = {*writers, *(PREFIX + name for name in LISTS)} - {
        name for page in pages.values() for name in list_sections(page)
    }
    if absent:
        raise SystemExit(f"No page has the section {', '.join(sorted(absent))}.")
    written = {place: fill_sections(page, writers) for place, page in pages.items()}
    lists = {PREFIX + name: partial(write, written) for name, write in LISTS.items()}
    written = {place: fill_sections(page, lists) for place, page in written.items()}
    with plt.rc_context(STYLE):
        curves = {METHOD_PICTURES / f"{name}.svg": draw_page(name) for name in find_experiments()}
    return written | curves | {ROOT / "docs/pictures" / name: draw_picture(name) for name in PICTURES}


if __name__ == "__main__":
    sys.exit(write_changes(build(), check="--check" in sys.argv[1:]))
