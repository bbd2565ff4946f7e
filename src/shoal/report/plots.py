"""Pictures as PNG files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal.display.curve_style import (
    COLOURS,
    COSTS,
    format_axis_title,
    format_label,
    pick_line_style,
    require_matplotlib,
    use_style,
)
from shoal.storage.files import explain_disk_errors


@contextmanager
def open_canvas(
    path: Path, rows: int, columns: int, size: tuple[float, float], **more: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its panels in our style, saved at the end."""
    require_matplotlib()
    from matplotlib.figure import Figure  # pyplot would show it in a notebook, too

    with use_style():
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, **more)
        yield figure, panels.ravel()
        with explain_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=140)


def draw_split(split: dict[str, Any], path: Path) -> None:
    """Classes per device as a heat map, with the degree in the title and the samples of every device below."""
    counts = np.array(split.get("counts") or split["labels"], dtype=float).T
    classes, devices = counts.shape
    width = min(14, max(5, 1.8 + 0.22 * devices))
    with open_canvas(path, 2, 1, (width, 2.6 + min(5, 0.22 * classes)), sharex=True, height_ratios=[4, 1]) as (
        figure,
        two,
    ):
        # the square root keeps small counts visible beside large ones
        image = two[0].imshow(
            counts, aspect="auto", cmap="Blues", norm="linear" if counts.max() < 20 else make_root_norm(counts)
        )
        two[0].set_ylabel("class")
        names = split.get("rows") or [str(c) for c in range(classes)]
        every = max(1, classes // 15)
        two[0].set_yticks(range(0, classes, every), names[::every])
        figure.colorbar(image, ax=two[0], label="samples", pad=0.01)
        sizes = split.get("sizes") or counts.sum(0)
        two[1].bar(range(devices), list(sizes)[:devices], color=COLOURS[0], width=0.8)
        two[1].set_ylabel("samples")
        two[1].set_xlabel("device" if devices >= len(sizes) else f"device (the first {devices} of {len(sizes)})")
        two[1].xaxis.get_major_locator().set_params(integer=True)
        two[0].set_title("samples of each class on each device" + format_degree(split.get("degree")))


def format_degree(degree: float | None) -> str:
    return "" if degree is None else f"; non-IID degree {degree:.4f}"


def make_root_norm(counts: Any) -> Any:
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=max(1.0, counts.max()))


def draw_curves(
    groups: Sequence[dict[str, Any]], metric: str, title: str, targets: Sequence[float], path: Path
) -> None:
    """One metric against rounds, time, bytes and computation: the mean over seeds, and the band they lie in."""
    seeds = max(len(group["seeds"]) for group in groups)
    with open_canvas(path, 2, 2, (11, 8), sharey=True) as (_, panels):
        for panel, (cost, (cost_title, unit)) in zip(panels, COSTS.items()):
            for number, group in enumerate(groups):
                if metric not in group["curves"]:
                    continue
                curve, style = group["curves"][metric], pick_line_style(number)
                x = np.array(curve[cost]) / unit
                panel.plot(x, curve["mean"], label=format_label(group["label"]), linewidth=1.8, **style)
                if len(group["seeds"]) > 1:
                    panel.fill_between(x, curve["low"], curve["high"], color=style["color"], alpha=0.15, linewidth=0)
            panel.set_xlabel(cost_title)
            panel.set_xlim(left=0)
            panel.grid(alpha=0.25)
            for target in targets:
                panel.axhline(target, color="#777777", linewidth=1, linestyle=(0, (4, 3)))
        panels[0].set_ylabel(format_axis_title(title + (f", mean and range of {seeds} seeds" if seeds > 1 else "")))
        panels[2].set_ylabel(format_axis_title(title))
        panels[3].legend(frameon=False, fontsize=9)


def draw_stacks(groups: Sequence[dict[str, Any]], what: str, path: Path) -> None:
    """What a round costs, stacked by cause: a panel for each method, all to one scale."""
    columns = 2 if len(groups) in (2, 4) else min(3, len(groups))
    rows = -(-len(groups) // columns)
    unit, title = (1e6, "megabytes a round") if what == "bytes" else (1, "simulated seconds a round")
    colours = assign_cause_colours(groups, what)
    with open_canvas(path, rows, columns, (1.5 + 3.6 * columns, 0.8 + 2.6 * rows), sharey=True) as (figure, panels):
        for panel, group in zip(panels, groups):
            stack = group[what]
            edges = np.array(stack["edges"])
            bottom = np.zeros(len(edges) - 1)
            for cause, values in zip(stack["causes"], stack["values"]):
                top = bottom + np.array(values) / unit
                panel.stairs(top, edges + 0.5, baseline=bottom, fill=True, color=colours[cause])
                bottom = top
            panel.set_title(format_label(group["label"], 40))
            panel.set_xlabel("round")
        for panel in panels[len(groups) :]:
            panel.axis("off")
        panels[0].set_ylim(0, find_tallest_stack(groups, what) / unit * 1.04 or 1)
        panels[0].set_ylabel(title)
        from matplotlib.patches import Patch

        patches = [Patch(color=colour, label=format_label(cause)) for cause, colour in colours.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(6, len(patches)), frameon=False)


def find_tallest_stack(groups: Sequence[dict[str, Any]], what: str) -> float:
    """The tallest stack of all methods."""
    return max(float(np.sum(group[what]["values"], axis=0).max(initial=0)) for group in groups)


def draw_devices(groups: Sequence[dict[str, Any]], path: Path) -> None:
    """The accuracy of every device, from the worst to the best."""
    with open_canvas(path, 1, 1, (7, 4.2)) as (_, panels):
        for number, group in enumerate(groups):
            if group["devices"]:
                values = group["devices"]["sorted"]
                share = (np.arange(len(values)) + 0.5) / len(values) * 100
                panels[0].plot(
                    share, values, label=format_label(group["label"]), linewidth=1.8, **pick_line_style(number)
                )
        panels[0].set_xlabel("devices, from the worst to the best (%)")
        panels[0].set_ylabel("accuracy on the device's own labels or test")
        panels[0].set_xlim(0, 100)
        panels[0].grid(alpha=0.25)
        panels[0].legend(frameon=False, fontsize=9)


def draw_classes(groups: Sequence[dict[str, Any]], path: Path) -> None:
    """The accuracy of every class at the end, a row for each method."""
    shown = [group for group in groups if group["classes"]]
    width = max(len(group["classes"]) for group in shown)
    table = [[np.nan if v is None else v for v in g["classes"]] + [np.nan] * (width - len(g["classes"])) for g in shown]
    with open_canvas(path, 1, 1, (min(14, 4 + 0.4 * width), 1.4 + 0.35 * len(shown))) as (figure, panels):
        image = panels[0].imshow(np.array(table, dtype=float), aspect="auto", cmap="Blues", vmin=0, vmax=1)
        panels[0].set_yticks(range(len(shown)), [format_label(group["label"], 40) for group in shown])
        panels[0].set_xlabel("class")
        panels[0].xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=panels[0], label="accuracy", pad=0.01)


def assign_cause_colours(groups: Sequence[dict[str, Any]], what: str) -> dict[str, str]:
    """Blues go down, oranges go up, green computes; the same colour for a cause in every panel."""
    families = {"down": COLOURS[0], "up": COLOURS[1], "compute": COLOURS[2]}
    counts: dict[str, int] = {}
    colours = {}
    for cause in sorted({c for group in groups for c in group[what]["causes"]}, key=rank_cause):
        way = cause.partition(":")[0]
        nth = counts[way] = counts.get(way, -1) + 1
        colours[cause] = lighten_colour(families.get(way, "#7A7A7A"), min(0.8, 0.34 * nth))
    return colours


def rank_cause(cause: str) -> tuple[int, bool, bool, str]:
    """Down, compute, up; in each the model first and the rest last."""
    way = cause.partition(":")[0]
    place = {"down": 0, "compute": 1, "up": 2}.get(way, 3)
    return place, cause.endswith(": other"), not cause.endswith(": model"), cause


def lighten_colour(colour: str, share: float) -> str:
    """A colour mixed with white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * share):02x}" for p in parts)
