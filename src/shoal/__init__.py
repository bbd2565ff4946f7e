"""shoal: federated learning when neither data nor devices are alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.compare.comparison import Comparison
from shoal.compare.comparison import resume_comparison as _resume_comparison
from shoal.compare.comparison import run_comparison as _run_comparison
from shoal.core.aggregate import average_replies
from shoal.core.batch import Batch, BatchScore, Samples
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.extras import Extra
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.plan import Plan
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Reply, Round
from shoal.core.version import VERSION
from shoal.runs.export import export
from shoal.runs.failed_runs import warn_of_failed_runs
from shoal.runs.given_objects import hand_over_again, hand_over_objects
from shoal.runs.history import History
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import COMPARISON_FILE
from shoal.runs.recipe_values import fit_value
from shoal.runs.session import Result, Watcher
from shoal.runs.start import resume_run as _resume_run
from shoal.runs.start import run_recipe as _run_recipe

__version__ = VERSION


def run(method: str = "fedavg", *, watch: Watcher | None = None, **recipe: Any) -> Result:
    """Run one method; every flag of the command line is a keyword here, for example `run("fedprox", rounds=10)`.

    `data` may also be tensors, a torch data set, a list of (x, y) per device or a folder, `model` a module.
    """
    result = _run_recipe(Recipe().with_values(method=method, **hand_over_objects(recipe)), watch)
    warn_of_failed_runs({method: [result]})
    return result


def resume(
    folder: str | Path,
    /,
    *,
    data: Any = None,
    model: Any = None,
    watch: Watcher | None = None,
    workers: int = 1,
    **budgets: Any,
) -> Any:
    """Go on with a run from its last checkpoint, for longer if asked: `resume("runs/x", rounds=100)`.

    A run that was begun with `data` or `model` as objects needs the same objects again, unless the program still has
    them from then; others are refused. Gives a `Result`, or for the folder of a comparison, whose runs may be divided
    among `workers` processes, a `Comparison`.
    """
    path = Path(folder)
    is_comparison = (path / COMPARISON_FILE).is_file()
    if workers > 1 and not is_comparison:
        raise ShoalError("bad-value", f"{path} is no comparison: there is one run to do.", "Leave out `workers`.")
    with hand_over_again(path, data, model):
        if is_comparison:
            comparison = _resume_comparison(path, watch, budgets, workers)
            warn_of_failed_runs(comparison.results)
            return comparison
        result = _resume_run(path, watch, budgets)
        warn_of_failed_runs({result.recipe.method: [result]})
        return result


def compare(
    methods: Sequence[str],
    *,
    seeds: int = 1,
    vary: Sequence[str] = (),
    watch: Watcher | None = None,
    workers: int = 1,
    **recipe: Any,
) -> Comparison:
    """Run several methods on the same data, devices and seeds: `compare(["fedavg", "scaffold"], seeds=3)`.

    `vary=["lr=0.01,0.1"]` runs each of them with each of these values. `workers=4` divides the runs among so many
    processes; a script that asks for it needs `if __name__ == "__main__":`.
    """
    for key, given in (("methods", methods), ("vary", vary)):
        if isinstance(given, str):
            raise ShoalError(
                "bad-value", f"{key} is the text {given[:80]!r}, and must be a list.", "Write [...] around it."
            )
    seeds, workers = fit_value("seeds", seeds, 1), fit_value("workers", workers, 1)
    comparison = _run_comparison(
        list(methods), Recipe().with_values(**hand_over_objects(recipe)), seeds, watch, vary, workers=workers
    )
    warn_of_failed_runs(comparison.results)
    return comparison


__all__ = [
    "Batch",
    "BatchScore",
    "Comparison",
    "Device",
    "Extra",
    "History",
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
    "average_replies",
    "compare",
    "compose",
    "export",
    "resume",
    "run",
    "tree",
]
