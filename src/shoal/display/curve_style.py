"""How curves look, in reports and in notebooks: colours, dashes, labels, the costs they are drawn against."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from textwrap import wrap
from typing import Any

from shoal.core.errors import ShoalError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5D3A9B", "#222222")
"""Distinguishable with any colour vision (after Okabe and Ito)."""
DASHES = ("-", "--", ":")
COSTS = {
    "rounds": ("rounds", 1),
    "seconds": ("simulated seconds", 1),
    "bytes": ("megabytes sent, both ways", 1e6),
    "macs": ("multiply-accumulates, 10⁹", 1e9),
}

STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11}
"""Settings of matplotlib in which our figures are made."""


def require_matplotlib() -> None:
    """Say what is missing before anything is computed, not after."""
    if find_spec("matplotlib") is None:
        raise ShoalError("missing-extra", "matplotlib is not installed.", "Run: pip install 'shoal[plot]'.")


@contextmanager
def use_style() -> Iterator[None]:
    """Inside, figures are made in our style, whichever way they are shown."""
    from matplotlib import rcParams

    before = {key: rcParams[key] for key in STYLE}  # rc_context would undo what a notebook's backend sets meanwhile
    rcParams.update(STYLE)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")
            yield
    finally:
        rcParams.update(before)


def make_axes() -> Any:
    """Axes of a new figure that pyplot knows, so that a notebook shows it at the end of its cell."""
    require_matplotlib()
    from matplotlib import pyplot

    with use_style():
        return pyplot.subplots(figsize=(6, 3.6), layout="constrained")[1]


def pick_line_style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def format_label(label: str, longest: int = 60) -> str:
    """Text as matplotlib shows it literally: no formulas, no hidden legend entries."""
    label = label if len(label) <= longest else label[: longest - 1] + "…"
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def format_axis_title(title: str) -> str:
    """A title for an axis, in lines that are no longer than the panels of our pictures are high."""
    return "\n".join(wrap(format_label(title, 120), 42))
