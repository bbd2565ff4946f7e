"""What `shoal reproduce --plan` prints: the cells of a table, what is there of them and what the rest would cost."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shoal.display.quantities import format_seconds

if TYPE_CHECKING:
    from shoal.reproduce.plan import CellPlan, TablePlan

PLACES = {"results": "in the ledger", "folder": "in the folder", "": ""}


def make_plan_tables(plan: "TablePlan") -> list[Table | Text]:
    """The missing cells in the order in which they are run, and a sentence about all of them."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for head in ("column", "method"):
        table.add_column(head, overflow="fold")
    for head in ("there", "rounds left", "takes"):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("estimated from", "decides"):
        table.add_column(head, overflow="fold")
    for cell in plan.cells:
        table.add_row(*map(Text, format_cell_plan(cell)))
    return [table, Text(summarise_plan(plan))]


def format_cell_plan(plan: "CellPlan") -> list[str]:
    there = PLACES[plan.place] or "missing"
    takes = "" if plan.place else "?" if plan.seconds is None else format_seconds(plan.seconds)
    source = plan.cost.source if plan.cost else ""
    left = "" if plan.place else f"{plan.rounds_left:,}"
    return [plan.cell.column.name, plan.cell.row.method, there, left, takes, source, ", ".join(plan.decides)]


def summarise_plan(plan: "TablePlan") -> str:
    """How many cells there are and are missing, and what those take in all."""
    missing, known = plan.missing, [cell.seconds for cell in plan.missing if cell.seconds is not None]
    there = f"{len(plan.cells) - len(missing)} of {len(plan.cells)} cells are there."
    if not missing:
        return there
    if not known:
        return f"{there} What the {len(missing)} others take is not known."
    here = all(cell.cost.is_of_this_machine for cell in missing if cell.cost)
    where = "on this machine" if here else "by what runs took elsewhere"
    rest = "" if len(known) == len(missing) else f"; of {len(missing) - len(known)} of them nothing is known"
    return f"{there} The {len(missing)} others take about {format_seconds(sum(known))} {where}{rest}."
