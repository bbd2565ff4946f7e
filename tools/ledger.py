"""The ledger in results/ as the tables of the documentation read it."""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from statistics import mean

from markers import ROOT

from shoal.reproduce.intervals import compute_interval
from shoal.reproduce.ledger import LEDGER_SUFFIX, LedgerRun, read_ledger_file
from shoal.reproduce.protocol import FAIR
from shoal.reproduce.run import Cell, attach_recorded_runs, make_cells
from shoal.reproduce.table import PaperTable
from shoal.reproduce.table_file import read_table
from shoal.runs.recipe_command import format_recipe_flags, quote_word

FOLDER = ROOT / "results"
ALWAYS_SHOWN = ("data", "model", "split", "lr")
"""Recipe keys that a command says even where they have their defaults."""

NEVER_SHOWN = ("method", "seed", "engine", "width")
"""Recipe keys that a command says otherwise, or that change only how fast a run is."""


@cache
def read_runs(name: str) -> tuple[LedgerRun, ...]:
    """The runs of one file of the ledger, in its order."""
    return read_ledger_file(FOLDER / f"{name}{LEDGER_SUFFIX}")


def group_by_method(name: str) -> dict[str, list[LedgerRun]]:
    """The runs of a file by method, in the file's order, each with its seeds in rising order."""
    groups: dict[str, list[LedgerRun]] = {}
    for run in read_runs(name):
        groups.setdefault(run.method, []).append(run)
    return {method: sorted(runs, key=lambda run: run.seed) for method, runs in groups.items()}


def format_interval(values: list[float], sign: str = "") -> str:
    """The mean of the values and half the width of its 95 % confidence interval."""
    return f"{mean(values):{sign}.2f} ± {compute_interval(values):.2f}"


def read_recorded_cells(name: str, protocol: str) -> tuple[PaperTable, list[Cell]]:
    """The table that `--record` wrote a file for, and its cells that are in it."""
    table = read_table(name).apply_protocol(protocol)
    cells = make_cells(table, "full", table.protocol.seeds, {}, Path())
    return table, [cell for cell in attach_recorded_runs(cells, read_runs(name), protocol) if cell.recorded]


def format_commands_of_table(name: str) -> str:
    """The commands that make the runs of a file that `shoal reproduce --record` wrote, one for each protocol."""
    lines = []
    for protocol in sorted({run.protocol for run in read_runs(name)}):
        table, cells = read_recorded_cells(name, protocol)
        rows = [row.method for row in table.rows if any(cell.row.method == row.method for cell in cells)]
        columns = [column.name for column in table.columns if any(cell.column.name == column.name for cell in cells)]
        words = [f"shoal reproduce {name}"]
        words += [f"--protocol {protocol}"] if protocol != FAIR else []
        words += [f"--column {quote_word(column)}" for column in columns] if len(columns) < len(table.columns) else []
        runnable = [row for row in table.rows if not row.missing]
        words += [f"--only {quote_word(','.join(rows))}"] if len(rows) < len(runnable) else []
        lines.append(" ".join(words))
    return "```sh\n" + "\n".join(lines) + "\n```\n"


def format_command(name: str, rounds: int | None = None, methods: Collection[str] = ()) -> str:
    """The command that makes the runs of a file, or those of some of its methods.

    `rounds` is what was asked for where runs were broken off.
    """
    if read_runs(name)[0].protocol:
        return format_commands_of_table(name)
    groups = {method: runs for method, runs in group_by_method(name).items() if not methods or method in methods}
    first = next(iter(groups.values()))
    recipe = first[0].parsed_recipe.with_values(**({"rounds": rounds} if rounds else {}))
    methods = " ".join(map(quote_word, groups))
    words = [f"shoal compare {methods}", f"--seeds {len(first)}"]
    words += format_recipe_flags(recipe, ALWAYS_SHOWN, NEVER_SHOWN)
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > 120:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return "```sh\n" + "\n".join(lines) + "\n```\n"
