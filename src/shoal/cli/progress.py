"""What the command line shows while runs go on: a bar per run, and log messages above the bars."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars
from rich.text import Text

from shoal.cli.console import make_console
from shoal.core.ledger import Row
from shoal.display.notebook_progress import describe_status
from shoal.engines.registry import EngineChoice
from shoal.runs.history import History
from shoal.runs.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.runs.watching import Watcher


class Progress:
    """A bar per run, or per method of a comparison, with accuracy, costs and the time left.

    With `as_json` it prints the rows themselves.

    `silent` shows no bars and of log messages only warnings; `quiet` shows no messages at all.
    """

    def __init__(self, silent: bool, as_json: bool, runs: int = 1, varied: Sequence[str] = (), quiet: bool = False):
        self.as_json, self.runs, self.varied = as_json, runs, varied
        self.bars = ProgressBars(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=make_console(stderr=True),
            disable=silent,
        )
        self.tasks: dict[str, Any] = {}
        level = logging.WARNING if silent else logging.INFO
        self.notices = NoticeHandler(None if quiet else self.bars.console, level)
        self.labels: dict[str, str] = {}
        """The method that a run of a comparison belongs to, by the fingerprint of its recipe."""
        self.rounds: dict[str, int] = {}
        """How many rounds of each run of a comparison are over."""
        self.ends: dict[str, float] = {}
        """The newest headline of each run of a comparison."""

    def plan_comparison(
        self, runs: Mapping[str, Sequence[Recipe]], count_rounds: Callable[[Recipe], int] = lambda recipe: 0
    ) -> None:
        """From now on show one bar for each method, and one for all runs with the time that is left in all.

        `count_rounds` says how many rounds of a run are over already.
        """
        for label, recipes in runs.items():
            self.labels |= {recipe.fingerprint(): label for recipe in recipes}
            self.rounds |= {recipe.fingerprint(): min(count_rounds(recipe), recipe.rounds) for recipe in recipes}
            total, over = sum(recipe.rounds for recipe in recipes), self.count_rounds_of(label)
            self.tasks[label] = self.bars.add_task(label, total=total, status="", completed=over, start=False)
        count, total = len(self.labels), sum(recipe.rounds for recipes in runs.values() for recipe in recipes)
        if count > 1:
            over = sum(self.rounds.values())
            self.tasks[""] = self.bars.add_task(f"all {count} runs", total=total, status="", completed=over)

    def count_rounds_of(self, label: str) -> int:
        return sum(rounds for run, rounds in self.rounds.items() if self.labels[run] == label)

    def __enter__(self) -> "Progress":
        log = logging.getLogger("shoal")
        log.addHandler(self.notices)
        log.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("shoal").removeHandler(self.notices)
        self.close()

    def close(self) -> None:
        """Leave the bars as they are."""
        if self.tasks:
            self.bars.stop()

    def show_row(self, recipe: Recipe, row: Row, history: History) -> None:
        """Bring the bar of a run up to a round that is over, or print its row as JSON."""
        if self.as_json:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            return
        key, end = recipe.fingerprint(), history.last(history.headline)
        name = "acc" if history.headline == "accuracy" else history.headline
        status = describe_status(history)
        if row.get("dropped"):
            status += f"  [yellow]{len(row['dropped'])} dropped[/yellow]"
        if row.get("void"):
            status += "  [red]void round[/red]"
        if row.get("stopped"):
            status += "  stopped"
        self.bars.start()
        if key in self.labels:
            return self.show_method(recipe, history, end, name)
        if key not in self.tasks:
            values = [f"{name}={getattr(recipe, name)}" for name in self.varied]
            label = ", ".join([recipe.method, *values]) + (f" seed {recipe.seed}" if self.runs > 1 else "")
            self.tasks[key] = self.bars.add_task(label, total=recipe.rounds, status="")
        self.bars.update(self.tasks[key], completed=len(history), status=status)

    def show_method(self, recipe: Recipe, history: History, end: float | None, name: str) -> None:
        """Bring the bar of a method, and that of all runs, up to a round that is over; a stopped run counts in full."""
        key = recipe.fingerprint()
        label = self.labels[key]
        self.rounds[key] = recipe.rounds if history.stop_reason else len(history)
        if end is not None:
            self.ends[key] = end
        ends = [value for run, value in self.ends.items() if self.labels[run] == label]
        status = f"{name} {mean(ends):.3f}" + (f", mean of {len(ends)} seeds" if len(ends) > 1 else "") if ends else ""
        self.bars.start_task(self.tasks[label])
        self.bars.update(self.tasks[label], completed=self.count_rounds_of(label), status=status)
        if "" in self.tasks:
            self.bars.update(self.tasks[""], completed=sum(self.rounds.values()))


class NoticeHandler(logging.Handler):
    """Prints log messages, each text once: warnings marked as such, others dimmed; nothing without a console."""

    def __init__(self, console: "Console | None", level: int = logging.INFO):
        super().__init__(level)
        self.console = console
        self.shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        once = text
        if record.args and isinstance(
            choice := record.args[0] if isinstance(record.args, tuple) else None, EngineChoice
        ):
            once = f"engine {replace(choice, why='')}"  # the times that decided differ from run to run
        if self.console and once not in self.shown:
            self.shown.add(once)
            warning = record.levelno >= logging.WARNING
            line = Text.assemble(("warning: ", "yellow"), text) if warning else Text(text, "dim")
            self.console.print(line, highlight=False, soft_wrap=True)


def hide_finished_bars(progress: Progress) -> "Watcher":
    """A watcher that removes the bar of a run that is over: a table has more cells than a screen has lines."""

    def show_row(recipe: Recipe, row: dict[str, Any], history: History) -> None:
        progress.show_row(recipe, row, history)
        if len(history) >= recipe.rounds or history.stop_reason:
            progress.bars.update(progress.tasks[recipe.fingerprint()], visible=False)

    return show_row


def combine_watchers(progress: Progress, log: str | None) -> "Watcher":
    """A watcher that shows every round on its bar, and passes it to the logger `log` where one is given."""
    if not log:
        return progress.show_row
    from shoal.runs.loggers import open_logger
    from shoal.runs.watching import GuardedWatchers

    log_row = GuardedWatchers([(f"The logger {log}", open_logger(log))])

    def watch_both(recipe: Recipe, row: dict[str, Any], history: History) -> None:
        progress.show_row(recipe, row, history)
        log_row(recipe, row, history)

    return watch_both
