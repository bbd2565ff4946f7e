"""What the command line prints about a comparison: methods side by side, their accuracy at equal cost, a picture."""

import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shoal.cli.console import make_console
from shoal.display.quantities import format_by_unit, format_number, format_seconds, format_size
from shoal.runs.failed_runs import refuse_all_void

if TYPE_CHECKING:
    from shoal.compare.comparison import Comparison

log = logging.getLogger("shoal")


def print_comparison(comparison: "Comparison", out: str, quiet: bool, as_json: bool) -> None:
    """Print the tables of a comparison, and draw its picture into the folder `out` where there is one."""
    if as_json:
        typer.echo(json.dumps(comparison.table()))
    elif not quiet:
        console = make_console()
        console.print(make_comparison_table(comparison))
        if tables := make_budget_tables(comparison):
            console.print(*tables, comparison.budgets.describe(comparison.headline), sep="", highlight=False)
        for line in format_further_metrics(comparison):
            console.print(line, highlight=False)
    if out and has_matplotlib():
        from shoal.report.write import draw_comparison

        picture = Path(out) / "comparison.png"
        draw_comparison(comparison, picture)
        if not (quiet or as_json):
            typer.echo(f"picture: {picture}")
    refuse_all_void(result.history for results in comparison.results.values() for result in results)


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def warn_without_matplotlib() -> None:
    """Say before anything is computed that no picture will be drawn."""
    if not has_matplotlib():
        log.warning("matplotlib is not installed, so that no picture is drawn: pip install 'shoal[plot]'.")


def make_comparison_table(comparison: "Comparison") -> Table:
    """Accuracy and costs of every method; the best accuracy is bold."""
    rows = comparison.table()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("method", overflow="fold", min_width=12)
    for head in (comparison.headline, "bytes", "simulated"):
        table.add_column(head, justify="right", no_wrap=True)
    if comparison.target:
        table.add_column(f"to {comparison.target:g}", justify="right", no_wrap=True)
    top = comparison.pick_best(row["accuracy"] for row in rows)
    for row in rows:
        accuracy = format_mean_accuracy(row)
        cells = [Text(row["method"]), Text(accuracy, "bold" if row["accuracy"] == top else "")]
        cells += [Text(format_size(row["bytes"])), Text(format_seconds(row["sim_seconds"]))]
        if comparison.target:
            cells.append(Text(format_cost_to_target(row)))
        table.add_row(*cells)
    return table


def format_cost_to_target(row: dict[str, Any]) -> str:
    """Rounds and bytes to the target, as means over the seeds that reached it, and how many did where not all."""
    if not row["reached"]:
        return "not reached"
    cost = f"{row['rounds_to_target']:.0f} rounds, {format_size(row['bytes_to_target'])}"
    return cost if row["reached"] == row["seeds"] else f"{row['reached']}/{row['seeds']}: {cost}"


def make_budget_tables(comparison: "Comparison") -> list[Table]:
    """The accuracy of methods at equal cost, in tables of at most four budgets; the best at each budget is bold."""
    reached = comparison.at_budgets()
    if len(reached) < 2 and not comparison.budgets:
        return []
    columns = list(zip(*reached.values()))
    kinds = [list(group) for _, group in groupby(columns, lambda column: column[0]["cost"])]
    kinds = [columns] if len(columns) <= 4 else kinds
    tables = []
    for shown in (group[first : first + 4] for group in kinds for first in range(0, len(group), 4)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("at equal cost", overflow="fold", min_width=12)
        for at in (column[0] for column in shown):
            format_cost = format_seconds if at["cost"] == "seconds" else format_size
            table.add_column(f"within {format_cost(at['budget'])}", justify="right")
        best = [comparison.pick_best(at["accuracy"] for at in column if at["seeds"]) for column in shown]
        for nth, (method, results) in enumerate(comparison.results.items()):
            cells = [format_reached_accuracy(column[nth], len(results)) for column in shown]
            is_best = [column[nth]["seeds"] and column[nth]["accuracy"] == top for column, top in zip(shown, best)]
            table.add_row(Text(method), *(Text(c, "bold" if top else "") for c, top in zip(cells, is_best)))
        tables.append(table)
    return tables


def format_reached_accuracy(at_budget: Mapping[str, Any], seeds: int) -> str:
    """The mean accuracy over the seeds that have a round within the budget, and how many have where not all."""
    accuracy = format_mean_accuracy(at_budget)
    return accuracy if at_budget["seeds"] in (0, seeds) else f"{at_budget['seeds']}/{seeds}: {accuracy}"


def format_mean_accuracy(row: Mapping[str, Any]) -> str:
    """The mean accuracy over seeds, and its deviation where there are several."""
    return format_number(row["accuracy"], 3) + (f" ± {row['spread']:.3f}" if row["spread"] is not None else "")


def format_further_metrics(comparison: "Comparison") -> list[str]:
    """A line for each metric to compare that only some runs have: its title, and its value by method."""
    rows, lines = comparison.table(), []
    for column, metric in comparison.metrics.items():
        there = [row for row in rows if row.get(column) is not None]
        if metric.compared and not metric.is_common and there and column != comparison.headline:
            values = ", ".join(f"{row['method']} {format_by_unit(row[column], metric.unit)}" for row in there)
            lines.append(f"{metric.title}: {values}")
    return lines
