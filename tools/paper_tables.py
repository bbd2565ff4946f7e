"""Tables of docs/results about what `shoal reproduce TABLE --record` put into the ledger: measured beside published."""

from collections.abc import Mapping, Sequence
from statistics import mean

from ledger import format_interval, read_recorded_cells, read_runs
from markers import format_table

from shoal.reproduce.figures import find_published
from shoal.reproduce.ledger import LedgerRun
from shoal.reproduce.measures import MEASURES, MeasuredValue, is_pruned
from shoal.reproduce.protocol import FAIR
from shoal.reproduce.run import Cell
from shoal.reproduce.table import PaperTable
from shoal.reproduce.table_file import read_table

BASE = "FedAvg"
NOT_THERE = "–"


def show_uploads(*names: str, column: str) -> str:
    """Of the recorded cells of a column: accuracy, its difference to FedAvg, upload, and seconds to the target."""
    cells = [(table, cell) for name in names for table, cell in list_cells(name, column)]
    base = next((read_accuracies(table, cell) for table, cell in cells if cell.row.method == BASE), {})
    rows = [format_row(table, cell, base) for table, cell in cells]
    heads = ["accuracy", f"minus {BASE}, paired", "published", "KB up", "published", "simulated s to the target"]
    return format_table(["", *heads], rows, numbers_from=1)


def list_cells(name: str, column: str) -> list[tuple[PaperTable, Cell]]:
    table, cells = read_recorded_cells(name, FAIR)
    return [(table, cell) for cell in cells if cell.column.name == column]


def read_values(table: PaperTable, cell: Cell, measure: str) -> dict[int, MeasuredValue]:
    """By seed what was measured, read as the protocol says."""
    reading, read = table.make_reading(cell.column, cell.row), MEASURES[measure].read
    values: dict[int, MeasuredValue] = {}
    for run, recipe in zip(cell.recorded, cell.recipes):
        value = read(run.cut(recipe.rounds), recipe.target, reading)
        if value is not None:
            values[run.seed] = value
    return values


def read_accuracies(table: PaperTable, cell: Cell) -> dict[int, float]:
    return {seed: value.value for seed, value in read_values(table, cell, "accuracy").items()}


def format_row(table: PaperTable, cell: Cell, base: Mapping[int, float]) -> list[str]:
    published = find_published(table, cell.column, cell.row)
    own = read_accuracies(table, cell)
    gaps = [own[seed] - base[seed] for seed in own if seed in base] if cell.row.method != BASE else []
    upload, told = MEASURES["upload"], MEASURES["upload"].find_published(published)
    accuracy = MEASURES["accuracy"].find_published(published)
    sizes = [value.value for value in read_values(table, cell, "upload").values()]
    return [
        cell.row.method,
        format_interval(list(own.values())),
        f"{format_interval(gaps, '+')}" if gaps else "",
        NOT_THERE if accuracy is None else f"{accuracy:.2f}",
        f"{mean(sizes) / 1e3:,.1f}",
        NOT_THERE if told is None else upload.format_value(told),
        format_seconds_to_target(list(read_values(table, cell, "time to target").values())),
    ]


def format_seconds_to_target(values: Sequence[MeasuredValue]) -> str:
    """The mean of the seeds that reached it, and how many those are where some did not."""
    reached = [value.value for value in values if value.complete]
    if not reached:
        return "never"
    return f"{mean(reached):.1f}" + ("" if len(reached) == len(values) else f" ({len(reached)} of {len(values)})")


def show_pruned_sizes(*names: str) -> str:
    """Operations before and after pruning of the recorded runs of some tables, also of those that were broken off."""
    rows = []
    for name in names:
        table = read_table(name).apply_protocol(FAIR)
        for column in table.columns:
            for row in table.rows:
                recipe = table.make_recipe(column, row, "full", {}, 0)
                runs = [
                    run for run in read_runs(name) if run.is_of(recipe.with_values(seed=run.seed)) and is_pruned(run)
                ]
                if runs:
                    published = MEASURES["final MACs"].find_published(find_published(table, column, row))
                    rows.append([column.name.removesuffix(", p 10 %"), row.method, *format_sizes(runs, published)])
    costs = ["M MACs before", "after, by seed", "mean", "published", "KB up before", "after", "rounds"]
    return format_table(["setting", "", *costs], rows, numbers_from=2)


def format_sizes(runs: Sequence[LedgerRun], published: float | None) -> list[str]:
    first = runs[0].rows[1]  # in the one before, devices also tell about themselves
    last = [run.rows[-1] for run in sorted(runs, key=lambda run: run.seed)]
    after = [row["macs_forward"] / 1e6 for row in last]
    kilobytes = [row["bytes_up"] / run.parsed_recipe.sample / 1e3 for run, row in zip(runs, last)]
    return [
        f"{first['macs_forward'] / 1e6:.3f}",
        ", ".join(f"{macs:.3f}" for macs in after),
        f"{mean(after):.3f}",
        NOT_THERE if published is None else f"{published:.1f}",
        f"{first['bytes_up'] / runs[0].parsed_recipe.sample / 1e3:.0f}",
        f"{mean(kilobytes):.0f}",
        ", ".join(str(n) for n in sorted({len(run.rows) for run in runs})),
    ]
