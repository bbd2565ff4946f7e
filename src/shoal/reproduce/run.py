"""Reproductions: the cells of a paper's table are run, and what came out is put beside what was published."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.compare.comparison import play_all_runs
from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.interrupts import STOP_KINDS, stop_error
from shoal.plugins.load import load_method
from shoal.reproduce.figures import find_published, make_figures, refuse_unmatched_columns
from shoal.reproduce.sheet import Sheet
from shoal.reproduce.table import PaperTable, TableColumn, TableRow
from shoal.reproduce.table_file import RESERVED, read_table
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
    """One method in one column: its recipes, one per seed."""

    column: TableColumn
    row: TableRow
    recipes: tuple[Recipe, ...]


def reproduce_table(
    name: str,
    scale: str = "full",
    seeds: int = 1,
    only: Sequence[str] = (),
    out: str = "",
    changes: Mapping[str, Any] | None = None,
    watch: Watcher | None = None,
) -> Sheet:
    """Run the cells of a table, or those of some methods; called again, it goes on where it was stopped.

    Runs of other methods that are complete in the same folder are shown too.
    """
    table, folder = read_table(name), Path(out or pick_default_folder(name, scale))
    cells = make_cells(table, scale, seeds, changes or {}, folder)
    requested = {row.method for row in select_rows(table, only)}
    refuse_unmatched_columns(table)
    for cell in cells:
        if cell.row.method in requested:
            load_method(cell.recipes[0].method, cell.recipes[0].parts)
        for recipe in cell.recipes:
            refuse_other_recipe(recipe)
    sheet = Sheet(table, scale, seeds)
    if not (folder / MARK).is_file():
        refuse_nonempty_folder(folder)
        sheet.write(folder)
    remove_strays(folder)
    for column in table.columns:
        column_cells = {cell.row.method: cell for cell in cells if cell.column is column}
        finish_cells([cell for cell in column_cells.values() if cell.row.method in requested], folder, watch)
        for row in table.rows:
            cell = column_cells.get(row.method)
            runs = read_complete_histories(cell) if cell else None
            if row.method in requested or runs:
                target = cell.recipes[0].target if cell else 0.0
                figures = make_figures(column, row, find_published(table, column, row), runs, target)
                sheet = replace(sheet, figures=(*sheet.figures, *figures))
        sheet.write(folder)
        log.info("%s is done; the table so far: %s", column.name, folder / "table.md")
    return sheet


def pick_default_folder(name: str, scale: str) -> str:
    return f"runs/{Path(name).stem if name.endswith('.toml') else name}" + ("-smoke" if scale == "smoke" else "")


def select_rows(table: PaperTable, only: Sequence[str]) -> list[TableRow]:
    """The rows of these methods, or all."""
    known = {row.method.lower(): row for row in table.rows}
    names = [name.strip() for text in only for name in text.split(",") if name.strip()]
    for name in names:
        if name.lower() not in known:
            advice = f"Its methods are: {', '.join(row.method for row in table.rows)}."
            raise ShoalError("unknown-name", f"{table.name} has no method called {name[:80]!r}.", advice)
    return [known[name.lower()] for name in names] or list(table.rows)


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
            if row.find_expression(column) is None:
                continue
            first = table.make_recipe(column, row, scale, changes)
            cell_folder = folder / column.folder / row.folder
            numbers = range(first.seed, first.seed + seeds)
            recipes = tuple(replace(first, seed=n, out=str(cell_folder / f"seed-{n}")) for n in numbers)
            cells.append(Cell(column, row, recipes))
    return cells


def finish_cells(cells: Sequence[Cell], folder: Path, watch: Watcher | None) -> None:
    """Play what is not complete yet; a stop says how to go on."""
    try:
        comparison = play_all_runs(
            {cell.row.method: cell.recipes for cell in cells if read_complete_histories(cell) is None}, 0.0, watch
        )
        warn_of_failed_runs(comparison.results)
    except (ShoalError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            error = stop_error(error, "Stopped.", "")
        if error.kind.name not in STOP_KINDS:
            raise
        advice = f"The same command goes on from there; what is finished lies in {folder}."
        raise ShoalError(error.kind.name, error.problem, advice) from None


def read_complete_histories(cell: Cell) -> list[History] | None:
    """The histories of a cell whose runs are all over; None if one is not, or if it has to be looked at for damage."""
    histories = []
    for recipe in cell.recipes:
        folder = RunFolder(Path(recipe.out), None)
        if not (folder.recipe_file.is_file() and folder.checkpoint_file.is_file()):
            return None
        try:
            history = read_history(folder.history_file, metrics=folder.read_metrics(), headline=recipe.headline)
        except ShoalError as error:
            if error.kind.name != "damaged":
                raise
            return None  # rows after the checkpoint may be torn; whoever resumes the run finds out
        if not is_run_over(recipe, history):
            return None
        histories.append(history)
    return histories


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
