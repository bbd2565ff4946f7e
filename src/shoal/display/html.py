"""Small HTML for notebooks, made without any library: tables, curves in cells; pictures where matplotlib is there."""

from base64 import b64encode
from collections.abc import Callable, Sequence
from html import escape
from importlib.util import find_spec
from io import BytesIO
from math import isfinite
from typing import Any

MAX_ROWS = 12
"""Rows of a table that are shown; what is left out is counted below it."""


def render_html_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", left_out: int = 0) -> str:
    """A table of at most MAX_ROWS rows, one line of text each; cells that begin with `<svg` are put in as they are."""
    left_out += max(0, len(rows) - MAX_ROWS)
    lines = [f"<p>{escape(title)}</p>"] if title else []
    lines.append(f"<table><thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr></thead><tbody>")
    for row in rows[:MAX_ROWS]:
        cells = (cell if cell.startswith("<svg") else escape(cell) for cell in row)
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    lines.append("</tbody></table>")
    if left_out:
        lines.append(f"<p>and {left_out} more</p>")
    return "\n".join(lines)


def draw_sparkline(values: Sequence[Any], width: int = 120, height: int = 24) -> str:
    """A curve as one line of SVG in the colour of the text; rounds without a finite value are passed over."""
    points = [(i, float(v)) for i, v in enumerate(values) if isinstance(v, (int, float)) and isfinite(v)]
    if len(points) < 2:
        return ""
    low, high = min(v for _, v in points), max(v for _, v in points)
    first, last = points[0][0], points[-1][0]
    every = max(1, len(points) // width)
    path = " ".join(
        f"{2 + (i - first) / (last - first) * (width - 4):.1f},"
        f"{height - 2 - ((v - low) / (high - low) if high > low else 0.5) * (height - 4):.1f}"
        for i, v in (*points[:-1][::every], points[-1])
    )
    label = f"from {points[0][1]:.4g} to {points[-1][1]:.4g}"
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="{label}">'
        f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def render_picture(draw: Callable[[Any], Any]) -> str:
    """What `draw` draws on axes of matplotlib as an image inside the HTML; nothing where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        return ""
    from matplotlib.figure import Figure  # without pyplot, which would show it a second time

    from shoal.display.curve_style import use_style

    with use_style():
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        draw(figure.subplots())
        figure.savefig(out := BytesIO(), dpi=90, format="png")
    return f'<img alt="curves" src="data:image/png;base64,{b64encode(out.getvalue()).decode()}"/>'
