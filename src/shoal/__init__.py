"""shoal: federated learning when neither data nor devices are alike."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shoal.compare  # noqa: F401  (the package, before a function of this name takes its place here)
from shoal.core.aggregate import average_replies
from shoal.core.batch import Batch, BatchScore, Samples
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.extras import Extra
from shoal.core.learning_task import LearningTask
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.plan import Plan
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Reply, Round
from shoal.core.version import VERSION

if TYPE_CHECKING:
    from shoal.compare.comparison import Comparison
    from shoal.compare.tuning import Tuning
    from shoal.fleet.profile import DeviceProfile
    from shoal.runs.export import export
    from shoal.runs.given_objects import hand_over_objects as hand_over_objects
    from shoal.runs.history import History
    from shoal.runs.predict import predict
    from shoal.runs.recipe import Recipe
    from shoal.runs.session import Result
    from shoal.runs.watching import Callback, Stop, WatchedRound
    from shoal.runs.watching import Watcher as Watcher

__version__ = VERSION

IMPORTED_ON_USE = {
    "Comparison": "shoal.compare.comparison",
    "DeviceProfile": "shoal.fleet.profile",
    "History": "shoal.runs.history",
    "Recipe": "shoal.runs.recipe",
    "Result": "shoal.runs.session",
    "Stop": "shoal.runs.watching",
    "Tuning": "shoal.compare.tuning",
    "WatchedRound": "shoal.runs.watching",
    "Watcher": "shoal.runs.watching",
    "export": "shoal.runs.export",
    "hand_over_objects": "shoal.runs.given_objects",
    "predict": "shoal.runs.predict",
}
"""Names that need all that a run needs, by module: imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in ("parts", "report"):
        return import_module(f"shoal.{name}")
    if name not in IMPORTED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(IMPORTED_ON_USE[name]), name)
    return value


def run(
    method: Any = "fedavg",
    *,
    callbacks: "Sequence[Callback] | Callback" = (),
    watch: "Watcher | None" = None,
    progress: bool | None = None,
    profile: str | Path = "",
    **recipe: Any,
) -> "Result":
    """Run one method; every flag of the command line is a keyword here, for example `run("fedprox", rounds=10)`.

    `method` may also be a part or a list of parts: `run([FedProx(0.1), MyPart()])`. `data` may be tensors, a frame, a
    torch data set, a list of (x, y) per device or a folder, `model` a module, `task` a `LearningTask`, `loss` a
    function of outputs and targets, `metrics` functions, `fleet` a list of speeds.
    `callbacks` are functions that see every round (`WatchedRound`) and stop the run where they return `Stop("why")`;
    `watch` is a function of (recipe, row, history). What they raise is said, and the run goes on without them.
    Bars show the progress in notebooks and terminals; `progress=False` hides them, and True shows them always.
    `profile="trace.json"` writes a trace of a round there, and `print(result.profile)` shows where the time went.
    """
    from shoal.cli.live_progress import follow_runs
    from shoal.runs.failed_runs import warn_of_failed_runs
    from shoal.runs.given_objects import hand_over_objects
    from shoal.runs.recipe import Recipe
    from shoal.runs.start import run_recipe
    from shoal.runs.watching import join_watchers

    joined = join_watchers(watch, callbacks)
    resolved = Recipe().with_values(**hand_over_objects({"method": method, **recipe}))
    with follow_runs(progress, watch, joined) as watcher:
        result = run_recipe(resolved, watcher, profile)
    warn_of_failed_runs({result.recipe.method: [result]})
    return result


def resume(
    folder: str | Path,
    /,
    *,
    method: Any = None,
    data: Any = None,
    model: Any = None,
    task: Any = None,
    loss: Any = None,
    parts: Any = (),
    metrics: Any = (),
    fleet: Any = None,
    callbacks: "Sequence[Callback] | Callback" = (),
    watch: "Watcher | None" = None,
    progress: bool | None = None,
    workers: int = 1,
    **budgets: Any,
) -> Any:
    """Go on with a run from its last checkpoint, for longer if asked: `resume("runs/x", rounds=100)`.

    A run that was begun with `data`, `model`, `task`, `loss`, `parts` (or a `method` of them), `metrics` or a `fleet`
    as objects needs the same objects again, unless the program still has them from then; others are refused. Gives a
    `Result`, or for the folder of a comparison or of a tuning, whose runs may be divided among `workers` processes, a
    `Comparison` or a `Tuning`.
    """
    from shoal.cli.live_progress import follow_runs
    from shoal.compare.comparison import resume_comparison
    from shoal.compare.tuning import resume_tuning
    from shoal.runs.failed_runs import warn_of_failed_runs
    from shoal.runs.given_objects import hand_over_again
    from shoal.runs.recipe_files import COMPARISON_FILE, TUNING_FILE
    from shoal.runs.start import resume_run
    from shoal.runs.watching import join_watchers

    path = Path(folder)
    _refuse_callbacks_in_processes(callbacks, workers)
    joined = join_watchers(watch, callbacks)
    is_comparison, is_tuning = ((path / name).is_file() for name in (COMPARISON_FILE, TUNING_FILE))
    if workers > 1 and not (is_comparison or is_tuning):
        raise ShoalError("bad-value", f"{path} is no comparison: there is one run to do.", "Leave out `workers`.")
    code = {"method": method, "parts": parts, "metrics": metrics, "fleet": fleet}
    several = 2 if is_comparison or is_tuning else 1
    with (
        hand_over_again(path, data, model, task, loss, **code),
        follow_runs(progress, watch, joined, several) as watcher,
    ):
        if is_comparison:
            comparison = resume_comparison(path, watcher, budgets, workers)
            warn_of_failed_runs(comparison.results)
            return comparison
        if is_tuning:
            return resume_tuning(path, watcher, budgets, workers)
        result = resume_run(path, watcher, budgets)
        warn_of_failed_runs({result.recipe.method: [result]})
        return result


def compare(
    methods: Sequence[Any],
    *,
    seeds: int = 1,
    vary: Sequence[str] = (),
    callbacks: "Sequence[Callback] | Callback" = (),
    watch: "Watcher | None" = None,
    progress: bool | None = None,
    workers: int = 1,
    **recipe: Any,
) -> "Comparison":
    """Run several methods on the same data, devices and seeds: `compare(["fedavg", "scaffold"], seeds=3)`.

    A method may also be a part or a list of parts: `compare(["fedavg", [FedProx(0.1), MyPart()]])`.

    `vary=["lr=0.01,0.1"]` runs each of them with each of these values. `workers=4` divides the runs among so many
    processes, and `workers=0` among as many as pay; a script that asks for it needs `if __name__ == "__main__":`.
    """
    from shoal.cli.live_progress import follow_runs
    from shoal.compare.comparison import run_comparison
    from shoal.runs.failed_runs import warn_of_failed_runs
    from shoal.runs.given_objects import hand_over_methods
    from shoal.runs.recipe_values import fit_value
    from shoal.runs.watching import join_watchers

    _refuse_text(methods=methods, vary=vary)
    _refuse_callbacks_in_processes(callbacks, workers)
    joined = join_watchers(watch, callbacks)
    seeds, workers = fit_value("seeds", seeds, 1), fit_value("workers", workers, 0)
    varied = [pair.partition("=")[0].strip() for pair in vary]
    expressions, shared = hand_over_methods(methods, recipe, varied)
    with follow_runs(progress, watch, joined, seeds, varied) as watcher:
        comparison = run_comparison(expressions, shared, seeds, watcher, vary, workers=workers)
    warn_of_failed_runs(comparison.results)
    return comparison


def tune(
    methods: Sequence[Any],
    over: Sequence[str],
    *,
    tries: int = 0,
    seeds: int = 1,
    sampler: str = "random",
    pruner: str = "none",
    side_by_side: int = 4,
    final_seeds: int = 0,
    watch: "Watcher | None" = None,
    progress: bool | None = None,
    workers: int = 1,
    **recipe: Any,
) -> "Tuning":
    """Try values on validation data: `tune(["fedavg", "fedprox"], ["lr=log:0.001:1", "fedprox.mu=0.01,0.1"], tries=8)`.

    Every method has the same number of tries. A share of the training samples (`validation`, 0.1 unless said) is held
    back to judge them; the test half is never looked at. With `out` the same call goes on where it was stopped.
    `sampler="tpe"` proposes by results, `side_by_side` tries at a time; `pruner="halving"` gives hopeless tries up;
    with `final_seeds=3` the winners are run on the test half in the end, with so many fresh seeds (`tuning.final`).
    """
    from shoal.cli.live_progress import follow_runs
    from shoal.compare.tuning import run_tuning
    from shoal.compare.tuning_spec import TuningSpec
    from shoal.runs.given_objects import hand_over_methods
    from shoal.runs.recipe_values import fit_value
    from shoal.runs.watching import join_watchers

    _refuse_text(methods=methods, over=over)
    counts = {"tries": tries, "seeds": seeds, "side_by_side": side_by_side, "final_seeds": final_seeds}
    counts = {key: fit_value(key, count, 1) for key, count in counts.items()}
    varied = [pair.partition("=")[0].strip() for pair in over]
    expressions, shared = hand_over_methods(methods, recipe, varied)
    spec = TuningSpec(tuple(expressions), shared, tuple(over), sampler=sampler, pruner=pruner, **counts)
    with follow_runs(progress, watch, join_watchers(watch), seeds) as watcher:
        return run_tuning(spec, watcher, fit_value("workers", workers, 1))


def _refuse_callbacks_in_processes(callbacks: Any, workers: int) -> None:
    """Refuse callbacks where runs train in other processes: they could neither see their models nor stop them."""
    if callbacks and workers != 1:
        problem = f"There are callbacks, and workers is {workers}: runs in other processes cannot be stopped from here."
        raise ShoalError("bad-value", problem, "Leave `workers` at 1, or give `watch`, which is told every row.")


def _refuse_text(**lists: Any) -> None:
    """Refuse one text where a list of texts is meant."""
    for key, given in lists.items():
        if isinstance(given, str):
            raise ShoalError(
                "bad-value", f"{key} is the text {given[:80]!r}, and must be a list.", "Write [...] around it."
            )


__all__ = [
    "Batch",
    "BatchScore",
    "Comparison",
    "Device",
    "DeviceProfile",
    "Extra",
    "History",
    "LearningTask",
    "Local",
    "Method",
    "Metric",
    "Neutral",
    "Part",
    "Plan",
    "Recipe",
    "Reply",
    "Result",
    "Round",
    "Samples",
    "ShoalError",
    "Stop",
    "Tuning",
    "WatchedRound",
    "average_replies",
    "compare",
    "compose",
    "export",
    "predict",
    "resume",
    "run",
    "tree",
    "tune",
]
