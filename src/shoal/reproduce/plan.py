"""Plans of reproductions: which cells of a table are there, what the others cost, and in which order they are run."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from shoal.compare.comparison import play_all_runs
from shoal.core.errors import ShoalError
from shoal.reproduce.claims import read_claims
from shoal.reproduce.cost import RoundCost, find_own_cost, find_recorded_cost, measure_round
from shoal.reproduce.ledger import (
    LEDGER_SUFFIX,
    LedgerRun,
    find_ledger_folder,
    make_ledger_run,
    read_ledger,
    record_runs,
)
from shoal.reproduce.protocol import FAIR
from shoal.reproduce.run import (
    MARK,
    Cell,
    attach_recorded_runs,
    explain_stop,
    list_requested_cells,
    make_cells,
    pick_default_folder,
    read_complete_histories,
    read_run_history,
    refuse_other_recipe,
    reproduce_table,
)
from shoal.reproduce.sheet import Sheet
from shoal.reproduce.table_file import read_table
from shoal.reproduce.verdicts import FAILS, OPEN, Verdict, judge_claims
from shoal.runs.failed_runs import warn_of_failed_runs
from shoal.runs.session import Watcher
from shoal.runs.store import count_rows_on_disk, refuse_nonempty_folder
from shoal.storage.durable import remove_strays

log = logging.getLogger("shoal")


@dataclass(frozen=True)
class CellPlan:
    """A cell with what is there of it, what the rest costs on this machine, and which open claims it decides."""

    cell: Cell
    place: str
    """Where it is complete: the ledger or the folder; "" where it is missing."""
    rounds_left: int
    """Of all seeds together."""
    cost: RoundCost | None = None
    decides: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """What the rest takes; None where nothing is known."""
        return 0.0 if self.place else None if self.cost is None else self.cost.seconds * self.rounds_left


@dataclass(frozen=True)
class TablePlan:
    """The cells of a table: those that are there, and the missing ones in the order in which they are to be run."""

    name: str
    cells: tuple[CellPlan, ...]
    heading: str = ""
    claims: Mapping[str, str] = field(default_factory=dict)
    """What the open claims say that its missing cells decide, by id."""

    @property
    def missing(self) -> list[CellPlan]:
        return [plan for plan in self.cells if not plan.place]

    @property
    def seconds(self) -> float | None:
        """What all missing cells take together; None where one is not known."""
        parts = [plan.seconds for plan in self.missing]
        return None if None in parts else sum(part for part in parts if part is not None)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        cells = [
            {
                "column": plan.cell.column.name,
                "method": plan.cell.row.method,
                "seeds": len(plan.cell.recipes),
                "there": plan.place,
                "rounds_left": plan.rounds_left,
                "seconds": plan.seconds,
                "estimated_from": plan.cost.source if plan.cost else "",
                "decides": list(plan.decides),
            }
            for plan in self.cells
        ]
        told = {"table": self.name, "missing": len(self.missing), "seconds": self.seconds}
        return told | {"claims": dict(self.claims), "cells": cells}


def plan_table(
    name: str,
    seeds: int | None = None,
    only: Sequence[str] = (),
    out: str = "",
    changes: Mapping[str, Any] | None = None,
    results: str = "",
    scale: str = "full",
    with_trials: bool = True,
    protocol: str = FAIR,
    columns: Sequence[str] = (),
) -> TablePlan:
    """Which cells of a table are in the ledger or complete in the folder, and what the others would cost here.

    Seconds per round are those of runs that are recorded; where there are none and `with_trials`, two rounds of one
    cell of the column are played and timed.
    """
    table, folder = read_table(name).apply_protocol(protocol), Path(out or pick_default_folder(name, scale, protocol))
    seeds = table.protocol.seeds if seeds is None else seeds
    place = find_ledger_folder(results)
    ledger = read_ledger(place) if scale == "full" else ()
    requested = list_requested_cells(table, only, columns)
    cells = attach_recorded_runs(make_cells(table, scale, seeds, changes or {}, folder), ledger, protocol)
    cells = [cell for cell in cells if (cell.column.name, cell.row.method) in requested]
    plans = [inspect_cell(cell) for cell in cells]
    plans = estimate_costs(plans, ledger, with_trials)
    ordered = tuple(order_plans(plans, table.name, place, protocol))
    says = {claim.id: claim.says for claim in read_claims(place)} if place else {}
    decided = dict.fromkeys(claim_id for plan in ordered for claim_id in plan.decides)
    return TablePlan(table.name, ordered, table.heading, {claim_id: says[claim_id] for claim_id in decided})


def inspect_cell(cell: Cell) -> CellPlan:
    """Where a cell is complete, or how many rounds it lacks."""
    for recipe in cell.recipes:
        refuse_other_recipe(recipe)
    if cell.recorded:
        return CellPlan(cell, "results", 0)
    if read_complete_histories(cell) is not None:
        return CellPlan(cell, "folder", 0)
    played = [min(count_rows_on_disk(Path(recipe.out)), recipe.rounds) for recipe in cell.recipes]
    return CellPlan(cell, "", sum(recipe.rounds for recipe in cell.recipes) - sum(played))


def estimate_costs(plans: Sequence[CellPlan], ledger: Sequence[LedgerRun], with_trials: bool) -> list[CellPlan]:
    """The plans with the seconds of a round of each missing cell; a trial of one cell stands for its column."""
    trials: dict[str, RoundCost | None] = {}

    def find_cost(cell: Cell) -> RoundCost | None:
        column, recipe = cell.column.name, cell.recipes[0]
        cost = find_own_cost(cell.recipes) or find_recorded_cost(recipe, ledger, here=True)
        if cost is None and with_trials:
            if column not in trials:
                trials[column] = measure_round(cell.recipes, cell.row.method)
            cost = trials[column]
        return cost or find_recorded_cost(recipe, ledger, here=False)

    return [replace(plan, cost=None if plan.place else find_cost(plan.cell)) for plan in plans]


def order_plans(plans: Sequence[CellPlan], table: str, ledger: Path | None, protocol: str = FAIR) -> list[CellPlan]:
    """Cells that are there first; then those of the open claim that is cheapest to decide, and so on; then the rest."""
    by_place = {(plan.cell.column.name, plan.cell.row.method): plan for plan in plans}
    needs: list[tuple[str, list[tuple[str, str]]]] = []
    for verdict in judge_claims(ledger, table) if ledger else ():
        claim = verdict.claim
        wanted = [(claim.column, row) for row in claim.rows]
        missing = [key for key in wanted if key in by_place and not by_place[key].place]
        if is_decided_by_runs(verdict, protocol) and missing:
            needs.append((claim.id, missing))
    needs.sort(key=lambda need: weigh_plans([by_place[key] for key in need[1]]))
    decides: dict[tuple[str, str], list[str]] = {}
    for claim_id, missing in needs:
        for key in missing:
            decides.setdefault(key, []).append(claim_id)
    marked = {key: replace(plan, decides=tuple(decides.get(key, ()))) for key, plan in by_place.items()}
    there = [plan for plan in marked.values() if plan.place]
    rest = [plan for key, plan in marked.items() if not plan.place and key not in decides]
    return [*there, *(marked[key] for key in decides), *rest]


def is_decided_by_runs(verdict: Verdict, protocol: str) -> bool:
    """Whether runs under a protocol can change a verdict: those of authors count only where `fair` says no."""
    if protocol == FAIR:
        return verdict.text == OPEN
    return verdict.fair.verdict == FAILS and verdict.authors.verdict == OPEN


def weigh_plans(plans: Sequence[CellPlan]) -> tuple[int, float]:
    """What cells cost together: in seconds, or, after all whose seconds are known, in rounds."""
    seconds = [plan.seconds for plan in plans]
    if None in seconds:
        return 1, sum(plan.rounds_left for plan in plans)
    return 0, sum(part for part in seconds if part is not None)


class TimeLimit:
    """A watcher that stops the runs after so many minutes, at the end of a round."""

    def __init__(self, minutes: float, watch: Watcher | None):
        self.end, self.watch, self.is_over = perf_counter() + 60 * minutes, watch, False

    def __call__(self, recipe: Any, row: Any, history: Any) -> Any:
        answer = self.watch(recipe, row, history) if self.watch else None
        if perf_counter() >= self.end:
            self.is_over = True
            raise ShoalError("interrupted", "The time is up.", "The same command goes on from there.")
        return answer


def run_plan(plan: TablePlan, folder: Path, minutes: float | None, watch: Watcher | None, workers: int = 1) -> bool:
    """Run the missing cells in their order, similar ones side by side; whether all were finished within the minutes."""
    recipes = {f"{p.cell.column.name}, {p.cell.row.method}": p.cell.recipes for p in plan.missing}
    if not recipes:
        return True
    limit = TimeLimit(float("inf") if minutes is None else minutes, watch)
    try:
        with explain_stop(folder):
            warn_of_failed_runs(play_all_runs(recipes, 0.0, limit, workers).results)
    except ShoalError:
        if not limit.is_over:
            raise
        return False
    return True


def reproduce_in_order(
    name: str,
    seeds: int | None = None,
    only: Sequence[str] = (),
    out: str = "",
    changes: Mapping[str, Any] | None = None,
    watch: Watcher | None = None,
    results: str = "",
    until_minutes: float | None = None,
    record: bool = False,
    protocol: str = FAIR,
    columns: Sequence[str] = (),
    workers: int = 1,
) -> Sheet:
    """Run the missing cells of a table in the order of what they decide, until the minutes are over.

    With `record` the runs of the folder are added to the ledger, also those of a call before and those broken off.
    """
    ledger = find_ledger_folder(results)
    if record and ledger is None:
        raise ShoalError("no-data", "There is no ledger to record in.", "Give its folder: --results FOLDER.")
    table, folder = read_table(name).apply_protocol(protocol), Path(out or pick_default_folder(name, "full", protocol))
    plan = plan_table(name, seeds, only, out, changes, results, "full", False, protocol, columns)
    if not (folder / MARK).is_file():
        refuse_nonempty_folder(folder)
        Sheet(table, "full", table.protocol.seeds if seeds is None else seeds).write(folder)
    remove_strays(folder)
    is_finished = run_plan(plan, folder, until_minutes, watch, workers)
    if record and ledger is not None:
        record_plan(plan, ledger, protocol)
    if not is_finished:
        log.warning("The %g minutes are over; the same command goes on from there.", until_minutes)
    return reproduce_table(name, "full", seeds, only, out, changes, watch, protocol, results, False, columns)


def record_plan(plan: TablePlan, ledger: Path, protocol: str) -> int:
    """Add the runs of the folder to the ledger, also those that were broken off; how many runs that were.

    What bytes and operations say needs no whole run; a longer run takes the place of a shorter one.
    """
    recipes = [recipe for p in plan.cells if not p.cell.recorded for recipe in p.cell.recipes]
    histories = [(recipe, read_run_history(recipe)) for recipe in recipes]
    runs = [make_ledger_run(recipe, history.rows, protocol) for recipe, history in histories if history]
    file = ledger / f"{plan.name}{LEDGER_SUFFIX}"
    number = record_runs(file, runs)
    if number:
        log.info("%d runs were recorded in %s", number, file)
    if number and " " in runs[0].commit:
        log.warning("They have the source %r, which nobody else can look up: commit first.", runs[0].commit)
    return number
