"""What the command line shows while runs go on: a bar per run, and log messages above the bars."""

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars
from rich.text import Text

from shoal.core.ledger import Row
from shoal.report.quantities import format_seconds, format_size
from shoal.runs.history import History
from shoal.runs.recipe import Recipe
from shoal.runs.session import Watcher


class Progress:
    """A bar per run with accuracy, simulated time, bytes and the time left; with `as_json`, the rows themselves.

    `silent` shows no bars and of log messages only warnings; `quiet` shows no messages at all.
    """

    def __init__(self, silent: bool, as_json: bool, runs: int = 1, varied: Sequence[str] = (), quiet: bool = False):
        self.as_json, self.runs, self.varied = as_json, runs, varied
        self.bars = ProgressBars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=silent,
        )
        self.tasks: dict[str, Any] = {}
        level = logging.WARNING if silent else logging.INFO
        self.notices = NoticeHandler(None if quiet else self.bars.console, level)

    def __enter__(self) -> "Progress":
        log = logging.getLogger("shoal")
        log.addHandler(self.notices)
        log.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("shoal").removeHandler(self.notices)
        if self.tasks:
            self.bars.stop()

    def show_row(self, recipe: Recipe, row: Row, history: History) -> None:
        """Bring the bar of a run up to a round that is over, or print its row as JSON."""
        if self.as_json:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            return
        key = recipe.fingerprint()
        if key not in self.tasks:
            self.bars.start()
            values = [f"{name}={getattr(recipe, name)}" for name in self.varied]
            label = ", ".join([recipe.method, *values]) + (f" seed {recipe.seed}" if self.runs > 1 else "")
            self.tasks[key] = self.bars.add_task(label, total=recipe.rounds, status="")
        value, name = history.last(history.headline), "acc" if history.headline == "accuracy" else history.headline
        status = f"{name} {value:.3f}  " if value is not None else ""
        status += f"{format_seconds(history.total('sim_seconds'))} simulated  "
        status += format_size(history.total("bytes_down", "bytes_up"))
        if row.get("dropped"):
            status += f"  [yellow]{len(row['dropped'])} dropped[/yellow]"
        if row.get("void"):
            status += "  [red]void round[/red]"
        self.bars.update(self.tasks[key], completed=len(history), status=status)


class NoticeHandler(logging.Handler):
    """Prints log messages, each text once: warnings marked as such, others dimmed; nothing without a console."""

    def __init__(self, console: Console | None, level: int = logging.INFO):
        super().__init__(level)
        self.console = console
        self.shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.console and text not in self.shown:
            self.shown.add(text)
            warning = record.levelno >= logging.WARNING
            line = Text.assemble(("warning: ", "yellow"), text) if warning else Text(text, "dim")
            self.console.print(line, highlight=False, soft_wrap=True)


def hide_finished_bars(progress: Progress) -> Watcher:
    """A watcher that removes the bar of a run that is over: a table has more cells than a screen has lines."""

    def show_row(recipe: Recipe, row: dict[str, Any], history: History) -> None:
        progress.show_row(recipe, row, history)
        if len(history) >= recipe.rounds:
            progress.bars.update(progress.tasks[recipe.fingerprint()], visible=False)

    return show_row


def combine_watchers(progress: Progress, log: str | None) -> Watcher:
    """A watcher that shows every round on its bar, and passes it to the logger `log` where one is given."""
    if not log:
        return progress.show_row
    from shoal.runs.loggers import open_logger

    log_row = open_logger(log)

    def watch_both(recipe: Recipe, row: dict[str, Any], history: History) -> None:
        progress.show_row(recipe, row, history)
        log_row(recipe, row, history)

    return watch_both
