"""Comparisons: several methods run on the same data, devices and seeds, with a table of accuracies and costs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from shoal.compare.budgets import CHEAPEST, COST_COLUMNS, Budgets, summarise_at_budget
from shoal.compare.comparison_summary import describe_comparison, format_text_table, list_methods, render_comparison
from shoal.compare.object_transfer import pickle_objects
from shoal.compare.parallel import run_in_processes
from shoal.compare.run_groups import group_similar_recipes
from shoal.compare.spec import ComparisonSpec, read_comparison_file, write_comparison_file
from shoal.compare.worker_choice import choose_workers
from shoal.core.errors import ShoalError
from shoal.core.interrupts import STOP_KINDS
from shoal.core.metric import Metric
from shoal.display.curve_style import make_axes
from shoal.display.data_frame import make_data_frame
from shoal.engines.part_faults import list_foreign_parts
from shoal.plugins.load import load_method
from shoal.runs.build import assemble_run
from shoal.runs.curves import draw_histories
from shoal.runs.engine_choice import EngineChoice, build_engine
from shoal.runs.given_objects import describe_way_to_resume, refuse_missing_objects
from shoal.runs.headline import pick_best
from shoal.runs.prepared_data import DatasetCache
from shoal.runs.recipe import Recipe
from shoal.runs.session import ActiveRun, Result, Watcher, is_run_over, play_runs
from shoal.runs.start import (
    CHANGEABLE_KEYS,
    change_budgets,
    load_result,
    prepare_new_run,
    prepare_resumed_run,
    refuse_fewer_rounds,
)
from shoal.runs.store import RunFolder, count_rows_on_disk, refuse_nonempty_folder
from shoal.runs.warn_once import suppress_repeated_warnings
from shoal.storage.durable import remove_strays

MAX_CPU_WIDTH = 20
"""Devices of several runs that are trained in one call on a processor: ten seeds of the benchmark's small job take
0.47 s a round with 20, 0.49 with 10 and 0.63 with 100."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of every method, one per seed."""

    results: dict[str, list[Result]]
    target: float = 0.0
    budgets: Budgets = CHEAPEST

    @property
    def headline(self) -> str:
        """The metric that is compared: accuracy, unless the recipe says otherwise."""
        return next((r.history.headline for results in self.results.values() for r in results), "accuracy")

    @property
    def metrics(self) -> dict[str, Metric]:
        """What is known of the columns of all histories."""
        return {k: m for results in self.results.values() for r in results for k, m in r.history.metrics.items()}

    def pick_best(self, values: Iterable[float | None]) -> float | None:
        """The best of several headlines; None where there is none."""
        metric = self.metrics.get(self.headline)
        return pick_best(values, metric.better if metric else "up")

    def table(self) -> list[dict[str, Any]]:
        """One row per method: end accuracy (or other headline) and its spread over seeds, costs, also to the target.

        Runs that are judged by another metric, as those of another task, have no headline here. Metrics that are
        `compared` have a key where a history has them: the mean of their sums or last values.
        """
        at_budgets = self.at_budgets()
        return [
            self._summarise_method(method, results) | {"at_budgets": at_budgets[method]}
            for method, results in self.results.items()
        ]

    def at_budgets(self, seconds: Sequence[float] = (), bytes: Sequence[float] = ()) -> dict[str, list[dict[str, Any]]]:
        """The accuracy of every method within equal costs: by default those of the cheapest method, seed by seed.

        `accuracy` is the mean over the `seeds` that have an evaluated round within the budget.
        """
        requested = Budgets(tuple(seconds) or self.budgets.seconds, tuple(bytes) or self.budgets.bytes)
        budgets: list[tuple[str, dict[int, float]]] = []
        for kind in COST_COLUMNS:
            given: list[float] = getattr(requested, kind)
            by_seed = [dict.fromkeys(self._seeds, budget) for budget in given] or [self._find_cheapest(kind)]
            budgets += [(kind, budget) for budget in by_seed]
        return {
            method: [
                summarise_at_budget([r for r in results if r.history.headline == self.headline], *budget)
                for budget in budgets
            ]
            for method, results in self.results.items()
        }

    def plot(self, x: str = "rounds", column: str = "", ax: Any = None) -> Any:
        """Draw the headline, or another column, of all methods over rounds, seconds, bytes or macs; the axes."""
        runs = {method: [r.history for r in results] for method, results in self.results.items()}
        return draw_histories(ax or make_axes(), runs, x, column, 0.0 if column else self.target)

    def to_pandas(self, rounds: bool = False) -> Any:
        """The table as a DataFrame; with `rounds`, every round of every run, with its method and seed."""
        if rounds:
            runs = [(method, r) for method, results in self.results.items() for r in results]
            return make_data_frame(
                [{"method": m, "seed": r.recipe.seed} | row for m, r in runs for row in r.history.rows]
            )
        return make_data_frame([{k: v for k, v in row.items() if k != "at_budgets"} for row in self.table()])

    def __repr__(self) -> str:
        return format_text_table(describe_comparison(self), *list_methods(self))

    def _repr_html_(self) -> str:
        return render_comparison(self)

    @property
    def _seeds(self) -> set[int]:
        return {r.recipe.seed for results in self.results.values() for r in results}

    def _find_cheapest(self, kind: str) -> dict[int, float]:
        """By seed, since methods meet the same devices under one seed: the least that any method spent in all.

        A method without that seed counts with its cheapest run; one that cost nothing does not count.
        """
        spent = [
            {r.recipe.seed: r.history.total(*COST_COLUMNS[kind]) for r in results}
            for results in self.results.values()
            if results
        ]
        totals = {
            seed: [totals_by_seed.get(seed, min(totals_by_seed.values())) for totals_by_seed in spent]
            for seed in self._seeds
        }
        return {seed: min((t for t in methods if t), default=0.0) for seed, methods in totals.items()}

    def _summarise_method(self, method: str, results: Sequence[Result]) -> dict[str, Any]:
        histories = [r.history for r in results]
        judged = [h for h in histories if h.headline == self.headline]
        ends = [end for h in judged if (end := h.end) is not None]
        bests = [best for h in judged if (best := h.best) is not None]
        row: dict[str, Any] = {
            "method": method,
            "seeds": len(results),
            "accuracy": mean(ends) if ends else None,
            "spread": stdev(ends) if len(ends) > 1 else None,
            "best": mean(bests) if bests else None,
            "bytes": mean(h.total("bytes_down", "bytes_up") for h in histories),
            "macs": mean(h.total("macs_work") for h in histories),
            "sim_seconds": mean(h.total("sim_seconds") for h in histories),
            "wall_seconds": mean(h.total("wall_seconds") for h in histories),
        }
        compared = {k: m for k, m in self.metrics.items() if m.compared and k not in (*row, self.headline)}
        for column, metric in compared.items():
            there = [h for h in histories if h.last(column) is not None]
            if there:
                row[column] = mean(h.total(column) if metric.total == "sum" else h.last(column) for h in there)
        if self.target:
            reached = [h.cost_to_target(self.target) for h in judged]
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
    """Run every method with every seed; with `out`, each in a folder of its own, so that it can be resumed.

    With several `workers` the runs are divided among so many processes; with 0, among as many as pay.
    """
    spec = ComparisonSpec(tuple(methods), recipe, seeds, tuple(vary), budgets)
    runs = spec.make_recipes()
    for recipes in runs.values():
        if list_foreign_parts(load_method(recipes[0].method, recipes[0].parts)):
            assemble_run(recipes[0])  # whatever is wrong with one part is told before another method trains
    if workers != 1:
        pickle_objects(recipe)  # what is refused leaves no folder
    if recipe.out:
        refuse_nonempty_folder(Path(recipe.out))
        remove_strays(Path(recipe.out))
        write_comparison_file(Path(recipe.out), spec)
    return replace(play_all_runs(runs, recipe.target, watch, workers), budgets=budgets)


def resume_comparison(
    path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None, workers: int = 1
) -> Comparison:
    """Finish a comparison that was stopped, or let it run longer; runs that are complete are only read."""
    spec = read_comparison_file(path)
    for recipes in spec.make_recipes().values():
        refuse_missing_objects(recipes[0], path)
    remove_strays(path)
    if changes:
        refuse_fewer_rounds(path, spec.recipe, changes)
        spec = replace(spec, recipe=change_budgets(spec.recipe, changes))
        write_comparison_file(path, spec)
    return replace(play_all_runs(spec.make_recipes(), spec.recipe.target, watch, workers), budgets=spec.budgets)


def play_all_runs(
    runs: Mapping[str, Sequence[Recipe]], target: float, watch: Watcher | None, workers: int = 1
) -> Comparison:
    """Play all runs, given by label, to their end; similar ones are trained together.

    They are divided among so many `workers`, that is processes, in their order; 0: among as many as pay.
    """
    results: dict[Recipe, Result] = {}
    recipes = [recipe for seeds in runs.values() for recipe in seeds]
    try:
        with suppress_repeated_warnings():
            workers = workers or choose_workers(recipes)
            if workers > 1 and len(recipes) > 1:
                results = run_in_processes(recipes, workers, watch)
            else:
                for group in group_similar_recipes(recipes):
                    results |= finish_group(group, watch)
    except ShoalError as error:
        if error.kind.name not in STOP_KINDS or not recipes[0].out:
            raise
        folder = Path(recipes[0].out).parent.parent
        raise ShoalError(
            error.kind.name, error.problem, f"{describe_way_to_resume(folder)} goes on from there."
        ) from None
    return Comparison({label: [results[recipe] for recipe in seeds] for label, seeds in runs.items()}, target)


def finish_group(recipes: Sequence[Recipe], watch: Watcher | None) -> dict[Recipe, Result]:
    """Play similar runs to their end: together, or one after the other where the engine is `serial`."""
    results: dict[Recipe, Result] = {}
    dataset_cache: DatasetCache = {}
    waiting: dict[EngineChoice, list[tuple[Recipe, ActiveRun]]] = {}
    for recipe in recipes:
        run = prepare_or_load_run(recipe, watch, dataset_cache)
        if isinstance(run, Result):
            results[recipe] = run
        elif run.pick.engine == "serial":
            results[recipe] = play_runs([run], build_engine(run.pick))[0]
        else:
            waiting.setdefault(replace(run.pick, why=""), []).append((recipe, run))
    try:
        for pick, group in waiting.items():  # resumed runs may have been begun with other engines
            together = [run for _, run in group]
            on_gpu = together[0].assembly.net.place.type == "cuda"
            engine = build_engine(pick, count_runs_in_a_call(len(group), pick.width, on_gpu))
            group_results = play_runs(together, engine)
            results |= {recipe: result for (recipe, _), result in zip(group, group_results)}
    finally:
        for _, run in chain(*waiting.values()):
            if run.folder:
                run.folder.close()
    return results


def count_runs_in_a_call(runs: int, width: int, on_gpu: bool) -> int:
    """Of how many runs one call trains devices: of all on a GPU; on a processor it is slower once its caches overflow.

    A run whose devices are trained one by one (`width` 1) has convolutions, which gain nothing from a wider call there.
    """
    if on_gpu:
        return runs
    return max(1, min(runs, MAX_CPU_WIDTH // width)) if width > 1 else 1


def prepare_or_load_run(recipe: Recipe, watch: Watcher | None, dataset_cache: DatasetCache) -> ActiveRun | Result:
    """A run ready to be played, new or resumed, or the result of one that is complete."""
    folder = Path(recipe.out)
    if not recipe.out or not (folder / "recipe.toml").is_file():
        return prepare_new_run(recipe, watch, dataset_cache)
    changes = {key: getattr(recipe, key) for key in CHANGEABLE_KEYS}
    if (folder / "checkpoint.safetensors").is_file():
        result = load_result(folder, recipe.data_dir)
        if is_run_over(recipe, result.history) and count_rows_on_disk(folder) >= len(result.history):
            return result
        recorded = RunFolder(folder, None).read_recipe()
        changes = {key: value for key, value in changes.items() if value != getattr(recorded, key)}
    return prepare_resumed_run(folder, watch, changes, dataset_cache)
