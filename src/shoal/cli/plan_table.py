"""What `shoal reproduce --plan` prints: the cells of a table, what is there of them and what the rest would cost."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.display.quantities import format_seconds

if TYPE_CHECKING:
    from shoal.reproduce.plan import CellPlan, TablePlan

PLACES = {"results": "in the ledger", "folder": "in the folder"}
HEADS = {"run": "right", "method": "left", "rounds left": "right", "takes": "right", "by": "left", "decides": "left"}
"""The columns of a plan, and the side to which their cells are set."""
ORDER = "in this order with --until-minutes or --record; otherwise setting after setting"
CLAIMS = "open claims, each settled by the cells of a setting that have its number"


def make_plan_tables(plan: "TablePlan") -> Group:
    """For each setting a title and a line for each method; then what the short words mean, and a sentence about all.

    Settings come in the order in which they are begun.
    """
    lines = make_cell_lines(plan)
    used = [number for number, cells in enumerate(zip(*lines)) if any(cells)]
    widths = [max(map(len, column)) for column in zip(HEADS, *lines)]
    shown: list[RenderableType] = [Text(plan.heading or plan.name, style="bold"), ""]
    shown += [make_cell_grid([list(HEADS)], used, widths, "dim"), ""]
    for name in dict.fromkeys(cell.cell.column.name for cell in (*plan.missing, *plan.cells)):
        own = [number for number, cell in enumerate(plan.cells) if cell.cell.column.name == name]
        shown.append(Text.assemble((name, "bold"), f"  {summarise_setting([plan.cells[number] for number in own])}"))
        shown += [make_cell_grid([lines[number] for number in own], used, widths), ""]
    if plan.missing:
        shown += [*make_notes(plan), ""]
    return Group(*shown, Text(summarise_plan(plan)))


def make_cell_grid(
    lines: Sequence[Sequence[str]], used: Sequence[int], widths: Sequence[int], style: str = ""
) -> Table:
    """Lines of cells, without columns that say nothing in any setting; equal widths put settings below each other."""
    table, sides = Table.grid(padding=(0, 2, 0, 0)), list(HEADS.values())
    for number in used:
        table.add_column(justify="right" if sides[number] == "right" else "left", min_width=widths[number], style=style)
    for line in lines:
        table.add_row(*(Text(line[number]) for number in used))
    return table


def make_cell_lines(plan: "TablePlan") -> list[list[str]]:
    """The words of each cell, in the order of HEADS."""
    order = {id(cell): str(number) for number, cell in enumerate(plan.missing, start=1)}
    claims = {claim_id: str(number) for number, claim_id in enumerate(plan.claims, start=1)}
    stars = make_stars(plan)
    lines = []
    for cell in plan.cells:
        method = cell.cell.row.method
        if cell.place:
            lines.append(["", method, "", PLACES[cell.place], "", ""])
            continue
        takes = "?" if cell.seconds is None else format_seconds(cell.seconds)
        by = cell.cost.basis + stars.get(cell.cost.machine, "") if cell.cost else ""
        decides = " ".join(sorted((claims[claim_id] for claim_id in cell.decides), key=int))
        lines.append([order[id(cell)], method, f"{cell.rounds_left:,}", takes, by, decides])
    return lines


def make_stars(plan: "TablePlan") -> dict[str, str]:
    """By name, the marks of other machines whose seconds stand for those of this one."""
    names = dict.fromkeys(cell.cost.machine for cell in plan.missing if cell.cost and cell.cost.machine)
    return {name: "*" * number for number, name in enumerate(names, start=1)}


def make_notes(plan: "TablePlan") -> list[Table]:
    """What the numbers, the short words and the stars in the lines stand for."""
    from shoal.reproduce.cost import BASES

    bases = {cell.cost.basis for cell in plan.missing if cell.cost}
    by = [(basis, text) for basis, text in BASES.items() if basis in bases]
    by += [(star, f"on another machine: {name}") for name, star in make_stars(plan).items()]
    claims = [(str(number), f"{says} ({name})") for number, (name, says) in enumerate(plan.claims.items(), start=1)]
    unknown = [("?", "nothing is known of it")] if any(cell.seconds is None for cell in plan.missing) else []
    return [
        make_note("run", [("", ORDER)]),
        *(make_note(head, lines) for head, lines in (("takes", unknown), ("by", by)) if lines),
        *([make_note("decides", [("", CLAIMS)]), make_note("", claims)] if claims else []),
    ]


def make_note(head: str, lines: Sequence[tuple[str, str]]) -> Table:
    """What the marks in one column stand for."""
    note = Table.grid(padding=(0, 2, 0, 0))
    note.add_column(min_width=len("decides"), style="dim")
    for number, (mark, text) in enumerate(lines):
        cells = [mark, text] if any(mark for mark, _ in lines) else [text]
        note.add_row("" if number else head, *map(Text, cells))
    return note


def summarise_setting(cells: Sequence["CellPlan"]) -> str:
    """How many cells of a setting are missing, and what these take together as far as it is known."""
    missing = [cell for cell in cells if not cell.place]
    if not missing:
        return "all there"
    known = [cell.seconds for cell in missing if cell.seconds is not None]
    seconds = [format_seconds(sum(known))] if known else []
    seconds += ["?"] if len(known) < len(missing) else []
    rounds = sum(cell.rounds_left for cell in missing)
    return f"{len(missing)} of {len(cells)} missing, {rounds:,} rounds, {' + '.join(seconds)}"


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
    takes = f"about {format_seconds(sum(known))} {where}"
    if len(known) == len(missing):
        return f"{there} The {len(missing)} others take {takes}."
    rest = len(missing) - len(known)
    return f"{there} {len(known)} of the {len(missing)} others take {takes}; of {rest} nothing is known."
