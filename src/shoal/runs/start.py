"""Start a run, resume one from its folder, or load the result of one."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.metric import encode_metrics
from shoal.core.server_state import ServerState
from shoal.runs.best_model import read_best_model
from shoal.runs.build import Assembly, assemble_run
from shoal.runs.engine_choice import (
    EngineChoice,
    build_engine,
    choose_engine,
    parse_engine_choice,
    restore_engine_choice,
    use_engine_settings,
)
from shoal.runs.given_objects import describe_way_to_resume, refuse_missing_objects, save_first_weights
from shoal.runs.history import History
from shoal.runs.model_content import note_model_content, refuse_changed_config, refuse_changed_content
from shoal.runs.patience import describe_end_of_patience
from shoal.runs.prepared_data import DatasetCache
from shoal.runs.profile import RunProfiler
from shoal.runs.recipe import Recipe
from shoal.runs.session import ActiveRun, Result, Watcher, play_runs
from shoal.runs.store import RunFolder, count_rows_on_disk
from shoal.runs.warn_once import suppress_repeated_warnings, warn_once

BUDGET_KEYS = (
    "rounds",
    "target",
    "until_accuracy",
    "patience",
    "until_seconds",
    "until_bytes",
    "until_macs",
    "checkpoint_every",
    "memory_mb",
)
"""Recipe keys that may change when a run is resumed, and be other ones in a folder that is gone on with."""
CHANGEABLE_KEYS = (*BUDGET_KEYS, "data_dir")
"""Those, and where the data lie, which may have been moved."""
COUNTS_OF_SPLIT = ("sizes", "labels", "server")
"""What `split.json` counts; its degrees are computed from that."""


def run_recipe(recipe: Recipe, watch: Watcher | None = None, profile: str | Path = "") -> Result:
    """Play a new run to its end, in memory or, where the recipe has `out`, in a folder.

    With `profile`, the name of a file, its phases are timed, and the trace of a round is written there.
    """
    with suppress_repeated_warnings():
        if profile:
            return profile_recipe(recipe, watch, RunProfiler(profile, recipe.rounds))
        run = prepare_new_run(recipe, watch)
        return play_runs([run], build_engine(run.pick))[0]


def profile_recipe(recipe: Recipe, watch: Watcher | None, profiler: RunProfiler) -> Result:
    """The result of a new run with its profile."""
    with profiler:
        run = prepare_new_run(recipe, profiler.follow_rounds(watch))
        profiler.begin_first_round()
        result = play_runs([run], build_engine(run.pick))[0]
    return replace(result, profile=profiler.write_profile())


def resume_run(path: Path, watch: Watcher | None = None, changes: Mapping[str, Any] | None = None) -> Result:
    """Play a run from its last checkpoint to its end; `changes` may only be of CHANGEABLE_KEYS."""
    if changes:
        refuse_fewer_rounds(path, RunFolder.open(path, to_write=False).read_recipe(), changes)
    run = prepare_resumed_run(path, watch, changes)
    return play_runs([run], build_engine(run.pick))[0]


def prepare_new_run(
    recipe: Recipe, watch: Watcher | None = None, dataset_cache: DatasetCache | None = None
) -> ActiveRun:
    """A new run before its first round; its folder is made where the recipe has `out`."""
    assembly = assemble_run(recipe, Path(recipe.out) / "memory" if recipe.out else None, dataset_cache)
    for wording, values in assembly.doubts():
        warn_once(wording, *values)
    if not recipe.out:
        return ActiveRun(assembly, choose_engine(assembly), watch=watch)
    folder = RunFolder.create(recipe)
    try:
        save_first_weights(recipe, folder.path)
        note_model_content(folder, recipe)
        folder.write_note("split", assembly.split())
        folder.write_note("metrics", encode_metrics(assembly.metrics))
        folder.write_note("task", assembly.task_note)
        pick = choose_engine(assembly)
        folder.write_note("engine", pick.to_dict())
    except BaseException:
        folder.close()
        raise
    return ActiveRun(assembly, pick, folder, watch=watch)


def prepare_resumed_run(
    path: Path,
    watch: Watcher | None = None,
    changes: Mapping[str, Any] | None = None,
    dataset_cache: DatasetCache | None = None,
) -> ActiveRun:
    """A run as its last checkpoint left it, rolled back to that and ready for the next round."""
    folder = RunFolder.open(path)
    try:
        pick = parse_engine_choice(folder.read_note("engine"))
        if pick and pick.engine == "flower":
            problem = (
                f"The run in {path} trains on real devices, and this would train on samples of the recipe instead."
            )
            raise ShoalError(
                "bad-value", problem, f"Use `shoal server RECIPE.toml --out {path}`, which goes on with it."
            )
        recipe = change_budgets(folder.read_recipe(), changes or {})
        refuse_missing_objects(recipe, path)
        refuse_changed_content(folder, recipe)
        assembly = assemble_run(replace(recipe, out=str(path)), folder.memory_folder, dataset_cache)
        refuse_other_samples(folder, assembly)
        checkpoint = folder.read_checkpoint(recipe, assembly.net, assembly.method.names)
        if checkpoint and checkpoint.server_state.cuts:  # before memories are restored with all cuts
            assembly.loop.follow_pruning(ServerState(assembly.net, {}, {}), checkpoint.server_state)
        folder.write_note("metrics", encode_metrics(assembly.metrics))
        folder.write_note("task", assembly.task_note)
        history = folder.roll_back(checkpoint, assembly.memory)
        if changes:
            folder.replace_recipe(recipe)
            drop_outdated_stop(folder, recipe, history)
        pick = restore_engine_choice(folder.read_note("engine"), assembly)
        folder.write_note("engine", pick.to_dict())
    except BaseException:
        folder.close()
        raise
    return ActiveRun(assembly, pick, folder, checkpoint.server_state if checkpoint else None, history, watch)


def refuse_other_samples(folder: RunFolder, assembly: Assembly) -> None:
    """Refuse to go on where devices have other samples than those that the run was begun with."""
    stored, found = folder.read_note("split") or {}, assembly.split()
    if any(key in stored and stored[key] != found[key] for key in COUNTS_OF_SPLIT):
        problem = f"Devices have other samples now than when the run in {folder.path} was begun."
        advice = "Give it the data of then (and the version of shoal, if that is newer now), or begin it anew."
        raise ShoalError("other-recipe", problem, advice)


def drop_outdated_stop(folder: RunFolder, recipe: Recipe, history: History) -> None:
    """Let a run that was stopped go on, unless its patience is at an end with the budgets of now."""
    if history.stop_reason and not describe_end_of_patience(recipe, history):
        del history.rows[-1]["stopped"]
        folder.replace_history(history)


def change_budgets(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with other budgets, or another folder of data; changes of any other key are refused."""
    fixed = sorted(changes.keys() - set(CHANGEABLE_KEYS))
    if fixed:
        problem, known = f"{fixed[0]} of a run cannot be changed.", ", ".join(CHANGEABLE_KEYS)
        raise ShoalError("bad-value", problem, f"Only {known} can.")
    return recipe.with_values(**changes)


def refuse_fewer_rounds(path: Path, recipe: Recipe, changes: Mapping[str, Any]) -> None:
    """Refuse a change to fewer rounds than a run in the folder, or in one below it, has played."""
    if "rounds" not in changes:
        return
    rounds = change_budgets(recipe, changes).rounds
    played = {file.parent: count_rows_on_disk(file.parent) for file in sorted(path.rglob("history.jsonl"))}
    longest = max(played, key=lambda folder: played[folder], default=path)
    if played and played[longest] > rounds:
        raise ShoalError(
            "bad-value",
            f"{longest} has played {played[longest]} rounds, and the model after round {rounds} is not kept.",
            f"Give rounds={played[longest]} or more, or start anew in another folder.",
        )


def load_result(path: Path, data_dir: str | None = None) -> Result:
    """The result of a run at its last checkpoint; nothing is trained and nothing is written.

    `data_dir` is where its data lie now, if not where the recipe says.
    """
    folder = RunFolder.open(path, to_write=False)
    recipe = folder.read_recipe()
    recipe = recipe if data_dir is None else replace(recipe, data_dir=data_dir)
    refuse_missing_objects(recipe, path)
    refuse_changed_config(folder, recipe)
    assembly = assemble_run(recipe)
    checkpoint = folder.read_checkpoint(recipe, assembly.net, assembly.method.names)
    if checkpoint is None:
        raise ShoalError(
            "no-run",
            f"{path} has no checkpoint yet.",
            f"Go on with it by {describe_way_to_resume(path, recipe)} first.",
        )
    history = folder.read_history_until(checkpoint)
    pick = parse_engine_choice(folder.read_note("engine"))
    with use_engine_settings(pick or EngineChoice("serial", threads=recipe.threads or 1)):
        params = assembly.loop.make_final_params(checkpoint.server_state, checkpoint.rounds)
    best = read_best_model(folder, history, assembly.net) if recipe.keep_best else None
    return Result(recipe, history, checkpoint.server_state.net, params, pick, best=best)
