"""Progress of calls from Python: bars in a notebook or a terminal, and nothing where neither is looked at."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shoal.display.notebook_progress import NotebookProgress, find_notebook

if TYPE_CHECKING:
    from shoal.core.ledger import Row
    from shoal.runs.history import History
    from shoal.runs.recipe import Recipe
    from shoal.runs.session import Watcher

log = logging.getLogger("shoal")


@contextmanager
def follow_runs(
    progress: bool | None,
    watch: "Watcher | None",
    joined: "Watcher | None",
    runs: int = 1,
    varied: Sequence[str] = (),
) -> Iterator["Watcher | None"]:
    """Inside, the watcher to be called after every round: it calls `joined`, and shows bars.

    With `progress` None bars are shown in a notebook or a terminal, unless the program has a `watch` of its own.
    """
    bars = open_bars(progress, watch, runs, varied)
    if bars is None:
        yield joined
        return

    def show_and_watch(recipe: "Recipe", row: "Row", history: "History") -> Any:
        answer = joined(recipe, row, history) if joined else None
        bars.show_row(recipe, row, history)  # after callbacks, so that it sees whether they stopped the run
        return answer

    try:
        yield show_and_watch
    finally:
        bars.close()


def open_bars(progress: bool | None, watch: Any, runs: int, varied: Sequence[str]) -> Any:
    """What shows bars here; None where nothing is to be shown."""
    if progress is False or (progress is None and watch is not None):
        return None
    if find_notebook() is not None:
        return NotebookProgress(with_seeds=runs > 1, varied=varied)
    if progress is None and not sys.stderr.isatty():
        return None
    if find_spec("rich") is None:
        if progress:
            log.warning("No progress is shown: rich is not installed.")
        return None
    from shoal.cli.progress import Progress

    return Progress(silent=False, as_json=False, runs=runs, varied=varied)
