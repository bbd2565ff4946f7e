"""What the command line shows of methods at equal cost, and of bytes counted in another way."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from shoal.report.quantities import format_number, format_seconds, format_size


def make_budget_tables(comparison) -> list[Table]:
    """What methods reached at equal cost, four budgets side by side at most; the best stand out."""
    found = comparison.at_budgets()
    if len(found) < 2 and not comparison.budgets:
        return []
    columns = list(zip(*found.values()))
    kinds = [list(own) for _, own in groupby(columns, lambda column: column[0]["cost"])]
    kinds = [columns] if len(columns) <= 4 else kinds
    tables = []
    for some in (own[first : first + 4] for own in kinds for first in range(0, len(own), 4)):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("at equal cost", overflow="fold", min_width=12)
        for at in (column[0] for column in some):
            told = format_seconds if at["cost"] == "seconds" else format_size
            table.add_column(f"within {told(at['budget'])}", justify="right")
        best = [max((at["accuracy"] for at in column if at["seeds"]), default=None) for column in some]
        for nth, (method, results) in enumerate(comparison.results.items()):
            cells = [format_reached_accuracy(column[nth], len(results)) for column in some]
            same = [column[nth]["seeds"] and column[nth]["accuracy"] == top for column, top in zip(some, best)]
            table.add_row(escape(method), *(f"[bold]{c}[/bold]" if top else c for c, top in zip(cells, same)))
        tables.append(table)
    return tables


def format_reached_accuracy(at: Mapping[str, Any], seeds: int) -> str:
    """The mean over the seeds that have a round within the budget, and how many have where not all of them."""
    told = format_number(at["accuracy"], 3) + (f" ± {at['spread']:.3f}" if at["spread"] is not None else "")
    return told if at["seeds"] in (0, seeds) else f"{at['seeds']}/{seeds}: {told}"


def format_block_traffic(comparison) -> str:
    """What methods sent down if all blocks of a model were of one size; nothing where none counts so."""
    rows = [row for row in comparison.table() if "bytes_down_by_blocks" in row]
    return ", ".join(f"{row['method']} {format_size(row['bytes_down_by_blocks'])}" for row in rows)
