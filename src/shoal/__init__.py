"""shoal: federated learning when neither data nor devices are alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module

from shoal import models
from shoal.compare import Comparison
from shoal.compare import compare as _compare
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.part import Neutral, Part
from shoal.data import dataset as datasets
from shoal.data.own import dataset_of
from shoal.export import export
from shoal.failed_runs import warn_of_failed_runs
from shoal.history import History
from shoal.models.own import net_of
from shoal.recipe import Recipe
from shoal.recipe_values import fit_value
from shoal.ride import Result, Watcher
from shoal.runner import resume as _resume
from shoal.runner import run as _run

__version__ = "0.1.0"


def handed_over(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe in which data and models that are objects have got names; they live as long as the program."""
    given = dict(recipe)
    if not isinstance(given.get("data", ""), (str, Path)):
        name = f"own-{len(datasets.HANDED_OVER)}"
        datasets.HANDED_OVER[name] = dataset_of(given["data"])
        given["data"] = name
    if isinstance(given.get("model"), Module):
        module, name = given["model"], f"own-{len(models.HANDED_OVER)}"
        models.HANDED_OVER[name] = lambda shape, classes: net_of(module, shape, classes)
        given["model"] = name
    return given


def run(method: str = "fedavg", *, watch: Watcher | None = None, **recipe: Any) -> Result:
    """Run one method; every flag of the command line is a keyword here, for example `run("fedprox", rounds=10)`.

    `data` may also be tensors, a torch data set, a list of (x, y) per device or a folder, `model` a module.
    """
    result = _run(Recipe().revised(method=method, **handed_over(recipe)), watch)
    warn_of_failed_runs({method: [result]})
    return result


def resume(folder: str | Path, /, *, watch: Watcher | None = None, **budgets: Any) -> Result:
    """Go on with a run from its last checkpoint, for longer if asked: `resume("runs/x", rounds=100)`."""
    result = _resume(Path(folder), watch, budgets)
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
    found = _compare(list(methods), Recipe().revised(**handed_over(recipe)), seeds, watch, vary, workers=workers)
    warn_of_failed_runs(found.results)
    return found


__all__ = [
    "Comparison",
    "History",
    "Method",
    "Neutral",
    "Part",
    "Recipe",
    "Result",
    "ShoalError",
    "compare",
    "compose",
    "export",
    "resume",
    "run",
]
