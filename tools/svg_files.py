"""Pictures as SVG files that are the same whenever they are drawn: without dates and random names."""

import io
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("svg")
from matplotlib import pyplot as plt

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shoal",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save_svg(figure: Figure) -> str:
    """The figure as the text of an SVG file; it is closed."""
    page = io.StringIO()
    figure.savefig(page, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())
