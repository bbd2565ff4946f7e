"""Reproductions: the cells of a paper's table are run, and what came out is put beside what was published."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.compare.comparison import play_all_runs
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.interrupts import STOP_KINDS, stop_error
from shoal.plugins.load import load_method
from shoal.reproduce.equal_costs import compare_methods
from shoal.reproduce.figures import (
    Figure,
    find_published,
    list_default_metrics,
    make_figures,
    make_figures_of_list,
    refuse_unmatched_columns,
)
from shoal.reproduce.ledger import LedgerRun, find_ledger_folder, make_run_key, read_ledger
from shoal.reproduce.metric_readers import Value
from shoal.reproduce.protocol import FAIR
from shoal.reproduce.sheet import Sheet
from shoal.reproduce.table import PaperTable, TableColumn, TableRow
from shoal.reproduce.table_checks import RESERVED
from shoal.reproduce.table_file import read_table
from shoal.runs.failed_runs import warn_of_failed_runs
from shoal.runs.history import History, read_history
from shoal.runs.recipe import Recipe
from shoal.runs.session import Watcher, is_run_over
from shoal.runs.store import RunFolder, refuse_nonempty_folder
from shoal.storage.durable import remove_strays

MARK = "table.json"
"""The file by which the folder of a reproduction is known."""
log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Cell:
    """One method in one column: its recipes, one per seed; of a list of settings those of the first go first."""

    column: TableColumn
    row: TableRow
    recipes: tuple[Recipe, ...]
    seeds: int = 1
    recorded: tuple[LedgerRun, ...] = ()
    """Runs of a ledger that are those of the recipes; none where one is missing."""

    def group_by_choice(self, runs: Sequence[History]) -> list[Sequence[History]]:
        """The seeds of each setting of a list; one group where there is no list."""
        return [runs[first : first + self.seeds] for first in range(0, len(runs), self.seeds)]


def reproduce_table(
    name: str,
    scale: str = "full",
    seeds: int | None = None,
    only: Sequence[str] = (),
    out: str = "",
    changes: Mapping[str, Any] | None = None,
    watch: Watcher | None = None,
    protocol: str = FAIR,
    results: str = "",
    play: bool = True,
    columns: Sequence[str] = (),
    workers: int = 1,
) -> Sheet:
    """Run the cells of a table, or those of some methods or columns; called again, it goes on where it was stopped.

    `seeds` are those of each cell; None is as many as the protocol asks for, and one at the scale smoke. Runs of
    other cells that are complete in the same folder are shown too. Cells that are in the ledger `results` are read
    from there; without `play` nothing else is run. With several `workers` the runs of a column are divided among so
    many processes; with 0, among as many as pay.
    """
    table, folder = read_table(name).apply_protocol(protocol), Path(out or pick_default_folder(name, scale, protocol))
    if seeds is None:
        seeds = 1 if scale == "smoke" else table.protocol.seeds
    cells = make_cells(table, scale, seeds, changes or {}, folder)
    if scale == "full":
        cells = attach_recorded_runs(cells, read_ledger(find_ledger_folder(results)), protocol)
    requested = list_requested_cells(table, only, columns)
    refuse_unmatched_columns(table)
    for cell in cells:
        if (cell.column.name, cell.row.method) in requested:
            for method in dict.fromkeys((recipe.method, recipe.parts) for recipe in cell.recipes):
                load_method(*method)
        for recipe in cell.recipes:
            refuse_other_recipe(recipe)
    sheet = Sheet(table, scale, seeds)
    if not (folder / MARK).is_file():
        refuse_nonempty_folder(folder)
        sheet.write(folder)
    remove_strays(folder)
    for column in table.columns:
        column_cells = {cell.row.method: cell for cell in cells if cell.column is column}
        if play:
            wanted = [cell for method, cell in column_cells.items() if (column.name, method) in requested]
            finish_cells(wanted, folder, watch, workers)
        runs = {method: own for method, cell in column_cells.items() if (own := read_complete_histories(cell))}
        for row in table.rows:
            if (column.name, row.method) in requested or row.method in runs:
                figures = make_cell_figures(table, column, row, column_cells.get(row.method), runs.get(row.method))
                sheet = replace(sheet, figures=(*sheet.figures, *figures))
        if table.protocol.name == FAIR and runs:
            told: dict[str, Value] = {
                metric: None for row in table.rows for metric in find_published(table, column, row)
            }
            metric = list_default_metrics(told, next(iter(runs.values())), 0.0)[0]
            figures = compare_methods(column.name, metric, runs, table.protocol.reading)
            sheet = replace(sheet, figures=(*sheet.figures, *figures))
        sheet.write(folder)
        log.info("%s is done; the table so far: %s", column.name, folder / "table.md")
    return sheet


def make_cell_figures(
    table: PaperTable, column: TableColumn, row: TableRow, cell: Cell | None, runs: list[History] | None
) -> list[Figure]:
    """What was published of a cell, and what was measured, where it ran."""
    published, reading = find_published(table, column, row), table.make_reading(column, row)
    reading = replace(reading, asked=cell.recipes[0].sample) if cell else reading
    target = cell.recipes[0].target if cell else 0.0
    groups = cell.group_by_choice(runs) if cell and runs else []
    if len(groups) > 1:
        return make_figures_of_list(column, row, published, groups, target, reading)
    return make_figures(column, row, published, runs, target, reading)


def pick_default_folder(name: str, scale: str, protocol: str = FAIR) -> str:
    stem = Path(name).stem if name.endswith(".toml") else name
    own = "" if protocol == FAIR else f"-{protocol}"
    return f"runs/{stem}{own}" + ("-smoke" if scale == "smoke" else "")


def select_rows(table: PaperTable, only: Sequence[str]) -> list[TableRow]:
    """The rows of these methods, or all."""
    known = {row.method.lower(): row for row in table.rows}
    names = [name.strip() for text in only for name in text.split(",") if name.strip()]
    for name in names:
        if name.lower() not in known:
            advice = f"Its methods are: {', '.join(row.method for row in table.rows)}."
            raise ShoalError("unknown-name", f"{table.name} has no method called {name[:80]!r}.", advice)
    return [known[name.lower()] for name in names] or list(table.rows)


def select_columns(table: PaperTable, names: Sequence[str]) -> list[TableColumn]:
    """The columns of these names, or all; names have commas in them, so each stands for itself."""
    known = {column.name.lower(): column for column in table.columns}
    for name in names:
        if name.strip().lower() not in known:
            advice = f"Its columns are: {'; '.join(column.name for column in table.columns)}."
            raise ShoalError("unknown-name", f"{table.name} has no column called {name[:80]!r}.", advice)
    return [known[name.strip().lower()] for name in names] or list(table.columns)


def list_requested_cells(table: PaperTable, only: Sequence[str], columns: Sequence[str]) -> set[tuple[str, str]]:
    """Column and method of the cells that were asked for."""
    rows = select_rows(table, only)
    return {(column.name, row.method) for column in select_columns(table, columns) for row in rows}


def make_cells(table: PaperTable, scale: str, seeds: int, changes: Mapping[str, Any], folder: Path) -> list[Cell]:
    """Every cell that shoal can run."""
    if scale not in ("full", "smoke"):
        raise unknown_name_error("scale", scale, ("full", "smoke"))
    if not 1 <= seeds <= 1000:
        raise ShoalError("bad-value", f"{seeds} seeds were asked for.", "Give 1 to 1000.")
    for key in changes.keys() & RESERVED.keys():
        raise ShoalError("bad-value", f"{key} is not set with -s here.", f"{RESERVED[key]}.")
    cells = []
    for column in table.columns:
        for row in table.rows:
            choices, recipes = row.list_choices(column), []
            for number, _ in enumerate(choices):
                first = table.make_recipe(column, row, scale, changes, number)
                cell_folder = folder / column.folder / row.folder
                cell_folder = cell_folder / f"choice-{number}" if len(choices) > 1 else cell_folder
                numbers = range(first.seed, first.seed + seeds)
                recipes += [replace(first, seed=n, out=str(cell_folder / f"seed-{n}")) for n in numbers]
            if recipes:
                cells.append(Cell(column, row, tuple(recipes), seeds))
    return cells


def attach_recorded_runs(cells: Sequence[Cell], ledger: Sequence[LedgerRun], protocol: str) -> list[Cell]:
    """The cells with their runs from a ledger, where it has all of them under this protocol."""
    by_key: dict[str, list[LedgerRun]] = {}
    for run in ledger:
        if run.protocol == protocol:
            by_key.setdefault(run.key, []).append(run)
    attached = []
    for cell in cells if by_key else ():
        found = [find_recorded_run(recipe, by_key) for recipe in cell.recipes]
        runs = tuple(run for run in found if run is not None)
        attached.append(replace(cell, recorded=runs if len(runs) == len(found) else ()))
    return attached if by_key else list(cells)


def find_recorded_run(recipe: Recipe, by_key: Mapping[str, Sequence[LedgerRun]]) -> LedgerRun | None:
    """The first run of a ledger that is one of this recipe, with the metrics that the recipe asks for."""
    found = next((run for run in by_key.get(make_run_key(recipe), ()) if run.covers(recipe)), None)
    return None if found is None else found.keep_metrics(recipe.metrics)


def finish_cells(cells: Sequence[Cell], folder: Path, watch: Watcher | None, workers: int = 1) -> None:
    """Play what is not complete yet; a stop says how to go on."""
    with explain_stop(folder):
        missing = {cell.row.method: cell.recipes for cell in cells if read_complete_histories(cell) is None}
        comparison = play_all_runs(missing, 0.0, watch, workers)
        warn_of_failed_runs(comparison.results)


@contextmanager
def explain_stop(folder: Path) -> Iterator[None]:
    """Inside, a stop by the user or by a signal is an error that says how to go on."""
    try:
        yield
    except (ShoalError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            error = stop_error(error, "Stopped.", "")
        if error.kind.name not in STOP_KINDS:
            raise
        advice = f"The same command goes on from there; what is finished lies in {folder}."
        raise ShoalError(error.kind.name, error.problem, advice) from None


def read_complete_histories(cell: Cell) -> list[History] | None:
    """The histories of a cell whose runs are all over; None if one is not, or if it has to be looked at for damage."""
    if cell.recorded:
        return [run.cut(recipe.rounds).history for run, recipe in zip(cell.recorded, cell.recipes)]
    histories = []
    for recipe in cell.recipes:
        history = read_run_history(recipe)
        if history is None or not is_run_over(recipe, history):
            return None
        histories.append(history)
    return histories


def read_run_history(recipe: Recipe) -> History | None:
    """The history of a run in its folder, whole or not; None if there is none, or it has to be looked at for damage."""
    folder = RunFolder(Path(recipe.out), None)
    if not (folder.recipe_file.is_file() and folder.checkpoint_file.is_file()):
        return None
    try:
        return read_history(folder.history_file, metrics=folder.read_metrics(), headline=folder.read_headline(recipe))
    except ShoalError as error:
        if error.kind.name != "damaged":
            raise
        return None  # rows after the checkpoint may be torn; whoever resumes the run finds out


def refuse_other_recipe(recipe: Recipe) -> None:
    """A folder that holds a run of another recipe is not gone on with."""
    folder = RunFolder(Path(recipe.out), None)
    if not folder.recipe_file.is_file():
        return
    recorded = folder.read_recipe()
    if recorded.fingerprint() == recipe.fingerprint():
        return
    steering = [f.name for f in fields(Recipe) if f.metadata.get("steers", True)]
    key = next(name for name in steering if getattr(recorded, name) != getattr(recipe, name))
    problem = f"{folder.path} was run with {key} = {getattr(recorded, key)!r}, not {getattr(recipe, key)!r}"
    raise ShoalError("other-recipe", f"{problem}.", "Give the same table and -s as then, or another --out.")
