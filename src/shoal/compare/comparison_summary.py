"""Comparisons and tunings as short tables, in text and in HTML, for terminals and notebooks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.core.short_repr import cut_text
from shoal.display.html import MAX_ROWS, draw_sparkline, render_html_table, render_picture
from shoal.display.quantities import format_number, format_seconds, format_size

if TYPE_CHECKING:
    from shoal.compare.comparison import Comparison
    from shoal.compare.tuning import Tuning

MAX_LINES = 15


def list_methods(comparison: "Comparison") -> tuple[list[str], list[list[str]]]:
    """Heads and cells: a row per method with its headline, best value, bytes and simulated seconds."""
    head = ["method", "seeds", comparison.headline, "best", "sent", "simulated"]
    rows = [
        [
            cut_text(row["method"], 48),
            str(row["seeds"]),
            format_number(row["accuracy"], 4) + (f" ± {row['spread']:.4f}" if row["spread"] is not None else ""),
            format_number(row["best"], 4),
            format_size(row["bytes"]),
            format_seconds(row["sim_seconds"]),
        ]
        for row in comparison.table()
    ]
    return head, rows


def list_tries(tuning: "Tuning") -> tuple[list[str], list[list[str]]]:
    """Heads and cells: a row per try, the best of each method first."""
    keys = list(dict.fromkeys(key for row in tuning.table() for key in row["settings"]))
    head = ["method", *keys, tuning.headline, "spread", ""]
    rows = [
        [
            cut_text(row["method"], 48),
            *(str(row["settings"].get(key, "")) for key in keys),
            format_number(row[tuning.headline], 4),
            format_number(row["spread"], 4),
            "best" if row["best"] else "",
        ]
        for row in sorted(tuning.table(), key=lambda row: not row["best"])
    ]
    return head, rows


def format_text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in columns of text, of at most MAX_LINES rows."""
    shown = [head, *rows[:MAX_LINES]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = [title, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown)]
    return "\n".join([*lines, f"and {len(rows) - MAX_LINES} more"] if len(rows) > MAX_LINES else lines)


def describe_comparison(comparison: "Comparison") -> str:
    rounds = {len(r.history) for results in comparison.results.values() for r in results}
    span = " to ".join(str(n) for n in sorted({min(rounds), max(rounds)})) if rounds else "0"
    several = "round" if rounds == {1} else "rounds"
    return f"Comparison of {count_things(len(comparison.results), 'method')}, {span} {several}"


def describe_tuning(tuning: "Tuning") -> str:
    count = sum(map(len, tuning.tries.values()))
    tries = "1 try" if count == 1 else f"{count} tries"
    return f"Tuning of {count_things(len(tuning.tries), 'method')}, {tries} over {', '.join(tuning.spec.over)}"


def count_things(count: int, word: str) -> str:
    """`1 method`, `2 methods`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def render_comparison(comparison: "Comparison") -> str:
    """The table with a curve for each method, and a picture of all where matplotlib is installed."""
    head, rows = list_methods(comparison)
    curves: list[Any] = [
        results[0].history[comparison.headline] if results else [] for results in comparison.results.values()
    ]
    rows = [[*row, draw_sparkline(curve)] for row, curve in zip(rows, curves)]
    table = render_html_table([*head, "curve"], rows, describe_comparison(comparison))
    is_drawn = any(sum(v is not None for v in curve) > 1 for curve in curves)
    shown = replace(comparison, results=dict(list(comparison.results.items())[:MAX_ROWS]))
    picture = render_picture(lambda ax: shown.plot(ax=ax)) if is_drawn else ""
    return f"{table}\n{picture}".strip()
