"""Comparisons: several methods on the same data, devices and seeds, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from shoal.compare.budgets import CHEAPEST, COST_COLUMNS, Budgets, summarise_at_budget
from shoal.compare.object_transfer import pickle_model
from shoal.compare.parallel import run_in_processes
from shoal.compare.spec import ComparisonSpec, read_comparison_file, write_comparison_file
from shoal.core.errors import ShoalError
from shoal.core.interrupts import STOP_KINDS
from shoal.engines.part_faults import list_foreign_parts
from shoal.plugins.load import load_method
from shoal.runs.build import DatasetCache, assemble_run
from shoal.runs.engine_choice import EngineChoice, build_engine
from shoal.runs.given_objects import describe_way_to_resume, is_handed_over, refuse_missing_objects
from shoal.runs.recipe import Recipe
from shoal.runs.session import ActiveRun, Result, Watcher, is_run_over, play_runs
from shoal.runs.start import BUDGET_KEYS, change_budgets, load_result, prepare_new_run, prepare_resumed_run
from shoal.runs.store import RunFolder, refuse_nonempty_folder
from shoal.runs.warn_once import suppress_repeated_warnings
from shoal.storage.durable import remove_strays

NUMBERS = {"lr": 1.0, "lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
"""Recipe keys in which runs may differ and still train side by side."""
MAX_OPEN_RUNS = 32
"""Runs that are open at the same time."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of every method, one per seed."""

    results: dict[str, list[Result]]
    target: float = 0.0
    budgets: Budgets = CHEAPEST

    def table(self) -> list[dict[str, Any]]:
        """One row per method: end accuracy with its spread over seeds, costs, costs to the target and at budgets."""
        at = self.at_budgets()
        return [
            self._summarise_method(method, own) | {"at_budgets": at[method]} for method, own in self.results.items()
        ]

    def at_budgets(self, seconds: Sequence[float] = (), bytes: Sequence[float] = ()) -> dict[str, list[dict[str, Any]]]:
        """What every method reached within equal costs: by default those of the cheapest method, seed by seed.

        `accuracy` is the mean over the `seeds` that have an evaluated round within the budget.
        """
        asked = Budgets(tuple(seconds) or self.budgets.seconds, tuple(bytes) or self.budgets.bytes)
        budgets: list[tuple[str, dict[int, float]]] = []
        for kind in COST_COLUMNS:
            given: list[float] = getattr(asked, kind)
            each = [dict.fromkeys(self._seeds, budget) for budget in given] or [self._find_cheapest(kind)]
            budgets += [(kind, budget) for budget in each]
        return {
            method: [summarise_at_budget(own, *budget) for budget in budgets] for method, own in self.results.items()
        }

    @property
    def _seeds(self) -> set[int]:
        return {r.recipe.seed for results in self.results.values() for r in results}

    def _find_cheapest(self, kind: str) -> dict[int, float]:
        """By seed, since methods meet the same devices under one seed: the least that any method spent in all.

        A method without that seed counts with its cheapest run; one that cost nothing does not count.
        """
        spent = [
            {r.recipe.seed: r.history.total(*COST_COLUMNS[kind]) for r in own} for own in self.results.values() if own
        ]
        totals = {seed: [own.get(seed, min(own.values())) for own in spent] for seed in self._seeds}
        return {seed: min((t for t in own if t), default=0.0) for seed, own in totals.items()}

    def _summarise_method(self, method: str, results: Sequence[Result]) -> dict[str, Any]:
        ends = [r.accuracy for r in results if r.accuracy is not None]
        histories = [r.history for r in results]
        row: dict[str, Any] = {
            "method": method,
            "seeds": len(results),
            "accuracy": mean(ends) if ends else None,
            "spread": stdev(ends) if len(ends) > 1 else None,
            "best": mean(h.best for h in histories if h.best is not None) if ends else None,
            "bytes": mean(h.total("bytes_down", "bytes_up") for h in histories),
            "macs": mean(h.total("macs_work") for h in histories),
            "sim_seconds": mean(h.total("sim_seconds") for h in histories),
            "wall_seconds": mean(h.total("wall_seconds") for h in histories),
        }
        told = [h for h in histories if h.last("bytes_down_by_blocks") is not None]
        if told:
            row["bytes_down_by_blocks"] = mean(h.total("bytes_down_by_blocks") for h in told)
        if self.target:
            reached = [h.cost_to_target(self.target) for h in histories]
            hits = [cost for cost in reached if cost is not None]
            row["reached"] = len(hits)
            for key in ("rounds", "sim_seconds", "bytes", "macs"):
                row[f"{key}_to_target"] = mean(cost[key] for cost in hits) if hits else None
        return row


def run_comparison(
    methods: Sequence[str],
    recipe: Recipe,
    seeds: int = 1,
    watch: Watcher | None = None,
    vary: Sequence[str] = (),
    budgets: Budgets = CHEAPEST,
    workers: int = 1,
) -> Comparison:
    """Run every method with every seed; with `out`, each in a folder of its own, so that a broken one goes on later.

    With several `workers` the runs are divided among so many processes.
    """
    listing = ComparisonSpec(tuple(methods), recipe, seeds, tuple(vary), budgets)
    runs = listing.make_recipes()
    for each in runs.values():
        if list_foreign_parts(load_method(each[0].method, each[0].parts)):
            assemble_run(each[0])  # whatever is wrong with one part is told before another method trains
    if workers > 1 and is_handed_over(recipe.model):
        pickle_model(recipe.model)  # what is refused leaves no folder
    if recipe.out:
        refuse_nonempty_folder(Path(recipe.out))
        remove_strays(Path(recipe.out))
        write_comparison_file(Path(recipe.out), listing)
    return replace(play_all_runs(runs, recipe.target, watch, workers), budgets=budgets)


def resume_comparison(
    path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None, workers: int = 1
) -> Comparison:
    """Finish a comparison that was broken off, or let all of it run longer; runs that are complete are only read."""
    listing = read_comparison_file(path)
    for own in listing.make_recipes().values():
        refuse_missing_objects(own[0], path)
    remove_strays(path)
    if changes:
        listing = replace(listing, recipe=change_budgets(listing.recipe, changes))
        write_comparison_file(path, listing)
    return replace(
        play_all_runs(listing.make_recipes(), listing.recipe.target, watch, workers), budgets=listing.budgets
    )


def play_all_runs(
    runs: Mapping[str, Sequence[Recipe]], target: float, watch: Watcher | None, workers: int = 1
) -> Comparison:
    """Every run brought to its end; those that can train side by side do."""
    results: dict[Recipe, Result] = {}
    every = [recipe for own in runs.values() for recipe in own]
    try:
        with suppress_repeated_warnings():
            if workers > 1 and len(every) > 1:
                results = run_in_processes(every, workers, watch)
            else:
                for group in group_similar_recipes(every):
                    results |= finish_group(group, watch)
    except ShoalError as error:
        if error.kind.name not in STOP_KINDS or not every[0].out:
            raise
        whole = Path(every[0].out).parent.parent
        raise ShoalError(
            error.kind.name, error.problem, f"{describe_way_to_resume(whole)} goes on from there."
        ) from None
    return Comparison({label: [results[recipe] for recipe in own] for label, own in runs.items()}, target)


def group_similar_recipes(recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
    """Recipes that differ only in their seed and in numbers, so that their devices can share programs and calls."""
    groups: dict[tuple, list[Recipe]] = {}
    for recipe in recipes:
        parts = tuple(type(p) for p in load_method(recipe.method, recipe.parts).parts)
        groups.setdefault((parts, replace(recipe, method="", seed=0, out="", **NUMBERS)), []).append(recipe)
    for group in groups.values():
        for first in range(0, len(group), MAX_OPEN_RUNS):
            yield group[first : first + MAX_OPEN_RUNS]


def finish_group(recipes: Sequence[Recipe], watch: Watcher | None) -> dict[Recipe, Result]:
    """Runs of one kind: side by side where the engine gains by it, else one after the other."""
    results: dict[Recipe, Result] = {}
    shelf: DatasetCache = {}
    waiting: dict[EngineChoice, list[tuple[Recipe, ActiveRun]]] = {}
    for recipe in recipes:
        ride = prepare_or_load_run(recipe, watch, shelf)
        if isinstance(ride, Result):
            results[recipe] = ride
        elif ride.pick.engine == "serial":
            results[recipe] = play_runs([ride], build_engine(ride.pick))[0]
        else:
            waiting.setdefault(replace(ride.pick, why=""), []).append((recipe, ride))
    try:
        for pick, own in waiting.items():  # those that are taken up again may have been begun in other ways
            ends = play_runs([ride for _, ride in own], build_engine(pick, len(own)))
            results |= {recipe: end for (recipe, _), end in zip(own, ends)}
    finally:
        for _, ride in chain(*waiting.values()):
            if ride.folder:
                ride.folder.close()
    return results


def count_rows_on_disk(folder: Path) -> int:
    """How many rows the history of a run has, of which a checkpoint may know more."""
    file = RunFolder(folder, None).history_file
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def prepare_or_load_run(recipe: Recipe, watch: Watcher | None, shelf: DatasetCache) -> ActiveRun | Result:
    """A run as it stands: not begun, broken off, or complete."""
    folder = Path(recipe.out)
    if not recipe.out or not (folder / "recipe.toml").is_file():
        return prepare_new_run(recipe, watch, shelf)
    changes = {key: getattr(recipe, key) for key in BUDGET_KEYS}
    if (folder / "checkpoint.safetensors").is_file():
        result = load_result(folder)
        if is_run_over(recipe, result.history) and count_rows_on_disk(folder) >= len(result.history):
            return result
        changes = {key: value for key, value in changes.items() if value != getattr(result.recipe, key)}
    return prepare_resumed_run(folder, watch, changes, shelf)
