"""Runs: start one, take one up again; what a kill leaves behind is always enough to go on."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.server_state import ServerState
from shoal.runs.build import Shelf, assemble
from shoal.runs.engine_choice import Pick, computing_as, crew_of, read_pick, recall_pick, settled
from shoal.runs.given_objects import keep_first_weights, refuse_missing, way_to_resume
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, Ride, Watcher, drive
from shoal.runs.store import Folder
from shoal.runs.warn_once import each_warning_once, warn_once

BUDGETS = (
    "rounds",
    "target",
    "until_accuracy",
    "until_seconds",
    "until_bytes",
    "until_macs",
    "checkpoint_every",
    "memory_mb",
)


def run(recipe: Recipe, watch: Watcher | None = None) -> Result:
    """A new run, in memory or, where the recipe says `out`, in a folder."""
    with each_warning_once():
        ride = begun(recipe, watch)
        return drive([ride], crew_of(ride.pick))[0]


def resume(path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None) -> Result:
    """Go on with a run from its last checkpoint; how long it runs may be changed, nothing else."""
    ride = taken_up(path, watch, changes)
    return drive([ride], crew_of(ride.pick))[0]


def begun(recipe: Recipe, watch: Watcher | None = None, shelf: Shelf | None = None) -> Ride:
    """A new run before its first round."""
    assembly = assemble(recipe, Path(recipe.out) / "memory" if recipe.out else None, shelf)
    for wording, values in assembly.doubts():
        warn_once(wording, *values)
    if not recipe.out:
        return Ride(assembly, settled(assembly), watch=watch)
    folder = Folder.create(recipe)
    try:
        keep_first_weights(recipe, folder.path)
        folder.note("split", assembly.split())
        pick = settled(assembly)
        folder.note("engine", pick.to_dict())
    except BaseException:
        folder.close()
        raise
    return Ride(assembly, pick, folder, watch=watch)


def taken_up(
    path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None, shelf: Shelf | None = None
) -> Ride:
    """A run as its last checkpoint left it, about to go on."""
    folder = Folder.open(path)
    try:
        pick = read_pick(folder.read_note("engine"))
        if pick and pick.engine == "flower":
            problem = (
                f"The run in {path} trains on real devices, and this would train on samples of the recipe instead."
            )
            raise ShoalError(
                "bad-value", problem, f"Use `shoal server RECIPE.toml --out {path}`, which goes on with it."
            )
        recipe = rebudgeted(folder.recipe(), changes or {})
        refuse_missing(recipe, path)
        assembly = assemble(replace(recipe, out=str(path)), folder.memory_folder, shelf)
        found = folder.checkpoint(recipe, assembly.net, assembly.method.names)
        if found and found.standing.cuts:  # before memories are taken up, which come with all cuts
            assembly.loop.follow_pruning(ServerState(assembly.net, {}, {}), found.standing)
        history = folder.tidy(found, assembly.memory)
        if changes:
            folder.revise(recipe)
        pick = recall_pick(folder.read_note("engine"), assembly)
        folder.note("engine", pick.to_dict())
    except BaseException:
        folder.close()
        raise
    return Ride(assembly, pick, folder, found.standing if found else None, history, watch)


def rebudgeted(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with other budgets."""
    fixed = sorted(changes.keys() - set(BUDGETS))
    if fixed:
        raise ShoalError("bad-value", f"{fixed[0]} of a run cannot be changed.", f"Only {', '.join(BUDGETS)} can.")
    return recipe.revised(**changes)


def opened(path: Path) -> Result:
    """A run as its last checkpoint left it; nothing is trained and nothing is changed."""
    folder = Folder.open(path, to_write=False)
    recipe = folder.recipe()
    refuse_missing(recipe, path)
    assembly = assemble(recipe)
    found = folder.checkpoint(recipe, assembly.net, assembly.method.names)
    if found is None:
        raise ShoalError(
            "no-run", f"{path} has no checkpoint yet.", f"Go on with it by {way_to_resume(path, recipe)} first."
        )
    history = folder.history(found)
    pick = read_pick(folder.read_note("engine"))
    with computing_as(pick or Pick("serial", threads=recipe.threads or 1)):
        final = assembly.loop.make_final_params(found.standing, found.rounds)
    return Result(recipe, history, found.standing.net, final, pick)
