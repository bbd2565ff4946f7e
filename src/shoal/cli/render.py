"""Tables that the command line prints at the end of a run and of the reproduction of a paper's table."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shoal.display.quantities import format_by_unit, format_count, format_number, format_seconds, format_size

if TYPE_CHECKING:
    from shoal.reproduce.sheet import Sheet
    from shoal.runs.profile import RunProfile
    from shoal.runs.session import Result


def make_summary_table(result: "Result") -> Table:
    """What one run reached and what it cost in all: bytes, multiply-accumulates, simulated and wall time."""
    history = result.history
    table = Table(title=result.recipe.method, show_header=False, title_justify="left")
    half = "validation " if result.recipe.validation else ""
    for column in dict.fromkeys((history.headline, "accuracy", "loss")):
        if column in (history.headline, "loss") or history.last(column) is not None:
            table.add_row(half + column, format_number(history.last(column), 4))
    table.add_row("rounds", str(len(history)))
    table.add_row(
        "sent down / up", f"{format_size(history.total('bytes_down'))} / {format_size(history.total('bytes_up'))}"
    )
    table.add_row("multiply-accumulates", format_count(history.total("macs_work")))
    table.add_row("simulated time", format_seconds(history.total("sim_seconds")))
    table.add_row("wall time", format_seconds(history.total("wall_seconds")))
    if result.engine:
        table.add_row("engine", str(result.engine))
    dropped = sum(len(row.get("dropped", ())) for row in history.rows)
    if dropped:
        table.add_row("replies dropped", str(dropped))
    if result.recipe.target:
        cost = history.cost_to_target(result.recipe.target)
        text = (
            f"round {cost['rounds']}, {format_size(cost['bytes'])}, {format_seconds(cost['sim_seconds'])}"
            if cost
            else "not reached"
        )
        table.add_row(f"to {result.recipe.target:g}", text)
    if history.stop_reason:
        table.add_row("stopped", history.stop_reason)
    if result.best:
        table.add_row("best model", f"after round {result.best.rounds}, {history.headline} {result.best.value:.4f}")
    if result.recipe.out:
        table.add_row("folder", result.recipe.out)
    for column, metric in history.metrics.items():
        shown = metric.is_common or column == history.headline
        if metric.compared and not shown and history.last(column) is not None:
            value = history.total(column) if metric.total == "sum" else history.last(column)
            table.add_row(metric.title, format_by_unit(value, metric.unit))
    return table


def make_profile_table(profile: "RunProfile") -> Table:
    """Where the time of a run went, and where its trace lies."""
    table = Table(title="where the time went", title_justify="left")
    for head in ("phase", "seconds", "share", "first round", "a later round"):
        table.add_column(head, justify="left" if head == "phase" else "right")
    for cells in profile.make_rows():
        table.add_row(*cells)
    table.caption = f"{profile.trace}: round {profile.traced_round}, for chrome://tracing or ui.perfetto.dev"
    return table


def make_sheet_tables(sheet: "Sheet") -> list[Table | Text]:
    """A paper's table: its heading, one table per column of the paper, and the remarks that belong to it."""
    parts: list[Table | Text] = [Text(sheet.table.heading, style="bold")]
    for name, heads, lines in sheet.make_sections():
        table = Table(title=Text(name), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for number, head in enumerate(heads):
            table.add_column(Text(head), justify="right" if number else "left", no_wrap=True)
        for line in lines:
            table.add_row(*map(Text, line))
        parts.append(table)
    return [*parts, *(Text(remark, style="dim") for remark in sheet.remarks)]
