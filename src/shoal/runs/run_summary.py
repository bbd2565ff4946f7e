"""A run in a few words and as a small HTML table, for terminals and notebooks."""

from typing import TYPE_CHECKING, Any

from shoal.core.metric import find_metric
from shoal.display.html import draw_sparkline, render_html_table, render_picture
from shoal.display.quantities import format_by_unit, format_number, format_seconds, format_size
from shoal.runs.curves import draw_histories

if TYPE_CHECKING:
    from shoal.runs.history import History
    from shoal.runs.session import Result

SHOWN_ROWS = 8
"""Rounds of a history that a notebook shows, evenly spread."""
SHOWN_COLUMNS = ("loss", "train_loss", "bytes_down", "bytes_up", "sim_seconds")


def describe_history(history: "History") -> str:
    """Rounds, last and best headline, bytes and simulated time."""
    last, best = history.end, history.best
    judged = f", {history.headline} {last:.4f}" if last is not None else ""
    judged += f" (best {best:.4f})" if best is not None and best != last else ""
    sent = format_size(history.total("bytes_down", "bytes_up"))
    rounds = f"{len(history)} round{'s' * (len(history) != 1)}"
    return f"{rounds}{judged}, {sent} sent, {format_seconds(history.total('sim_seconds'))} simulated"


def describe_result(result: "Result") -> str:
    """What was trained on what, and how it went."""
    recipe = result.recipe
    return f"{recipe.method} on {recipe.data} with {recipe.model}: {describe_history(result.history)}"


def render_history(history: "History", title: str = "") -> str:
    """A sparkline of the headline and some rows as a table."""
    rows = history.rows
    chosen = sorted({round(i * (len(rows) - 1) / (SHOWN_ROWS - 1)) for i in range(SHOWN_ROWS)}) if rows else []
    columns = [c for c in dict.fromkeys((history.headline, *SHOWN_COLUMNS)) if any(c in row for row in rows)]
    cells = [[str(rows[i]["round"] + 1), *(format_cell(history, c, rows[i].get(c)) for c in columns)] for i in chosen]
    cells.append(["", *(draw_sparkline(history[c], 72, 20) for c in columns)])
    return render_html_table(["round", *columns], cells if rows else [], title or describe_history(history))


def render_result(result: "Result") -> str:
    """The history with a picture of its headline, where matplotlib is installed."""
    table = render_history(result.history, describe_result(result))
    runs = {result.recipe.method: [result.history]}
    is_drawn = sum(v is not None for v in result.history[result.history.headline]) > 1
    picture = render_picture(lambda ax: draw_histories(ax, runs)) if is_drawn else ""
    return f"{table}\n{picture}".strip()


def format_cell(history: "History", column: str, value: Any) -> str:
    metric = find_metric(column, history.metrics)
    if not isinstance(value, (int, float)):
        return "-"
    return format_by_unit(value, metric.unit) if metric else format_number(value, 4)
