"""Comparisons: several methods on the same data, devices and seeds, side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from shoal.core.errors import ShoalError
from shoal.files import write_bytes
from shoal.recipe import Recipe, from_file, toml
from shoal.runner import BUDGETS, Result, Watcher, opened, rebudgeted, resume, run, spent
from shoal.store import refuse_taken
from shoal.strangers import method_of

LIST = "compare.toml"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of every method, one per seed."""

    results: dict[str, list[Result]]
    target: float = 0.0

    def table(self) -> list[dict[str, Any]]:
        """One row per method: end accuracy with its spread over seeds, costs, and costs to the target."""
        return [self._row(method, results) for method, results in self.results.items()]

    def _row(self, method: str, results: Sequence[Result]) -> dict[str, Any]:
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
        if self.target:
            reached = [h.to_target(self.target) for h in histories]
            hits = [cost for cost in reached if cost is not None]
            row["reached"] = len(hits)
            for key in ("rounds", "sim_seconds", "bytes", "macs"):
                row[f"{key}_to_target"] = mean(cost[key] for cost in hits) if hits else None
        return row


def compare(methods: Sequence[str], recipe: Recipe, seeds: int = 1, watch: Watcher | None = None) -> Comparison:
    """Run every method with every seed; with `out`, each in a folder of its own, so that a broken one goes on later."""
    methods = list(methods)
    recipes = planned(methods, recipe, seeds)
    for each in recipes:
        method_of(each)
    if recipe.out:
        refuse_taken(Path(recipe.out))
        write_list(Path(recipe.out), methods, seeds, recipe)
    return played(recipes, recipe.target, watch)


def go_on(path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None) -> Comparison:
    """Finish a comparison that was broken off, or let all of it run longer; runs that are complete are only read."""
    methods, seeds, recipe = listed_in(path)
    if changes:
        recipe = rebudgeted(recipe, changes)
        write_list(path, methods, seeds, recipe)
    return played(planned(methods, replace(recipe, out=str(path)), seeds), recipe.target, watch)


def write_list(path: Path, methods: Sequence[str], seeds: int, recipe: Recipe) -> None:
    """What a comparison consists of, as a file."""
    listed = f"methods = {toml(tuple(methods))}\nseeds = {seeds}\n" + replace(recipe, method=methods[0]).to_toml()
    write_bytes(path / LIST, listed.encode())


def listed_in(path: Path) -> tuple[list[str], int, Recipe]:
    found = from_file(path / LIST)
    methods, seeds = found.pop("methods", None), found.pop("seeds", None)
    if not isinstance(methods, list) or not all(isinstance(m, str) for m in methods) or not isinstance(seeds, int):
        raise ShoalError(
            "damaged", f"{path / LIST} names no methods and seeds.", "Restore it, or start anew in another folder."
        )
    return methods, seeds, Recipe().revised(**found)


def planned(methods: Sequence[str], recipe: Recipe, seeds: int) -> list[Recipe]:
    """One recipe per method and seed."""
    twice = [m for m in methods if methods.count(m) > 1]
    if not methods or twice or not 1 <= seeds <= 1000:
        found = f"{twice[0]} is listed twice" if twice else f"{len(methods)} methods and {seeds} seeds"
        raise ShoalError(
            "bad-value", f"A comparison cannot be made: {found}.", "Give different methods and 1 to 1000 seeds."
        )
    made = []
    for number, method in enumerate(methods):
        for seed in range(recipe.seed, recipe.seed + seeds):
            folder = re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-.")[:60]
            out = str(Path(recipe.out) / f"{number}-{folder}" / f"seed-{seed}") if recipe.out else ""
            made.append(recipe.revised(method=method, seed=seed, out=out))
    return made


def played(recipes: Sequence[Recipe], target: float, watch: Watcher | None) -> Comparison:
    results: dict[str, list[Result]] = {}
    for recipe in recipes:
        try:
            results.setdefault(recipe.method, []).append(brought_to_end(recipe, watch))
        except ShoalError as error:
            if error.kind.name != "interrupted" or not recipe.out:
                raise
            whole = Path(recipe.out).parent.parent
            raise ShoalError("interrupted", error.problem, f"`shoal resume {whole}` goes on from there.") from None
    return Comparison(results, target)


def brought_to_end(recipe: Recipe, watch: Watcher | None) -> Result:
    folder = Path(recipe.out)
    if not recipe.out or not (folder / "recipe.toml").is_file():
        return run(recipe, watch)
    if (folder / "checkpoint.safetensors").is_file():
        result = opened(folder)
        changes = {key: getattr(recipe, key) for key in BUDGETS if getattr(recipe, key) != getattr(result.recipe, key)}
        if spent(recipe, result.history):
            return result
        return resume(folder, watch, changes)
    return resume(folder, watch, {key: getattr(recipe, key) for key in BUDGETS})
