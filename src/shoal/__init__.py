"""shoal: federated learning when neither data nor devices are alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.compare import Comparison
from shoal.compare import compare as _compare
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.part import Neutral, Part
from shoal.history import History
from shoal.recipe import Recipe
from shoal.runner import Result, Watcher
from shoal.runner import resume as _resume
from shoal.runner import run as _run

__version__ = "0.1.0"


def run(method: str = "fedavg", *, watch: Watcher | None = None, **recipe: Any) -> Result:
    """Run one method; every flag of the command line is a keyword here, for example `run("fedprox", rounds=10)`."""
    return _run(Recipe().revised(method=method, **recipe), watch)


def resume(folder: str | Path, /, *, watch: Watcher | None = None, **budgets: Any) -> Result:
    """Go on with a run from its last checkpoint, for longer if asked: `resume("runs/x", rounds=100)`."""
    return _resume(Path(folder), watch, budgets)


def compare(methods: Sequence[str], *, seeds: int = 1, watch: Watcher | None = None, **recipe: Any) -> Comparison:
    """Run several methods on the same data, devices and seeds: `compare(["fedavg", "scaffold"], seeds=3)`."""
    return _compare(list(methods), Recipe().revised(**recipe), seeds, watch)


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
    "resume",
    "run",
]
