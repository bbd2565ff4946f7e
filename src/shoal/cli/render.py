"""What the command line shows: progress, summaries, tables."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from shoal.core.errors import unknown_name_error
from shoal.core.ledger import Row
from shoal.report.quantities import format_count, format_number, format_seconds, format_size
from shoal.runs.history import History
from shoal.runs.recipe import Recipe

BY_BLOCKS = "bytes down, blocks counted alike"


class Progress:
    """A bar per run with accuracy, simulated time, bytes and the time left; with `as_json`, the rows themselves.

    What is `silent` has no bar and tells of nothing but warnings, what is `quiet` not of them either.
    """

    def __init__(self, silent: bool, as_json: bool, runs: int = 1, varied: Sequence[str] = (), quiet: bool = False):
        self.as_json, self.runs, self.varied = as_json, runs, varied
        self.bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=silent,
        )
        self.tasks: dict[str, Any] = {}
        least = logging.WARNING if silent else logging.INFO
        self.notices = NoticeHandler(None if quiet else self.bar.console, least)

    def __enter__(self) -> "Progress":
        log = logging.getLogger("shoal")
        log.addHandler(self.notices)
        log.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("shoal").removeHandler(self.notices)
        if self.tasks:
            self.bar.stop()

    def show_row(self, recipe: Recipe, row: Row, history: History) -> None:
        """A round is over."""
        if self.as_json:
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            return
        key = recipe.fingerprint()
        if key not in self.tasks:
            self.bar.start()
            values = [f"{key}={getattr(recipe, key)}" for key in self.varied]
            name = ", ".join([recipe.method, *values]) + (f" seed {recipe.seed}" if self.runs > 1 else "")
            self.tasks[key] = self.bar.add_task(name, total=recipe.rounds, told="")
        accuracy = history.last("accuracy")
        told = f"acc {accuracy:.3f}  " if accuracy is not None else ""
        told += f"{format_seconds(history.total('sim_seconds'))} simulated  "
        told += format_size(history.total("bytes_down", "bytes_up"))
        if row.get("dropped"):
            told += f"  [yellow]{len(row['dropped'])} dropped[/yellow]"
        if row.get("void"):
            told += "  [red]void round[/red]"
        self.bar.update(self.tasks[key], completed=len(history), told=told)


class NoticeHandler(logging.Handler):
    """What the program has to say by the way, each thing once: warnings as such, the rest dimly.

    Nothing is said where there is no console.
    """

    def __init__(self, console: Console | None, least: int = logging.INFO):
        super().__init__(least)
        self.console = console
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.console and text not in self.said:
            self.said.add(text)
            warning = record.levelno >= logging.WARNING
            shown = Text.assemble(("warning: ", "yellow"), text) if warning else Text(text, "dim")
            self.console.print(shown, highlight=False, soft_wrap=True)


def make_summary_table(result) -> Table:
    """The end of one run."""
    history: History = result.history
    table = Table(title=result.recipe.method, show_header=False, title_justify="left")
    table.add_row("accuracy", format_number(result.accuracy, 4))
    table.add_row("loss", format_number(history.last("loss"), 4))
    table.add_row("rounds", str(len(history)))
    table.add_row(
        "sent down / up", f"{format_size(history.total('bytes_down'))} / {format_size(history.total('bytes_up'))}"
    )
    table.add_row("multiply-accumulates", format_count(history.total("macs_work")))
    table.add_row("simulated time", format_seconds(history.total("sim_seconds")))
    table.add_row("wall time", format_seconds(history.total("wall_seconds")))
    if result.engine:
        table.add_row("engine", str(result.engine))
    dropped = sum(len(row.get("dropped", ())) for row in history.rows)
    if dropped:
        table.add_row("replies dropped", str(dropped))
    if result.recipe.target:
        cost = history.cost_to_target(result.recipe.target)
        told = (
            f"round {cost['rounds']}, {format_size(cost['bytes'])}, {format_seconds(cost['sim_seconds'])}"
            if cost
            else "not reached"
        )
        table.add_row(f"to {result.recipe.target:g}", told)
    if result.recipe.out:
        table.add_row("folder", result.recipe.out)
    if result.history.last("bytes_down_by_blocks") is not None:
        table.add_row(BY_BLOCKS, format_size(result.history.total("bytes_down_by_blocks")))
    return table


def make_comparison_table(comparison) -> Table:
    """Methods side by side; the best accuracy stands out."""
    rows = comparison.table()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("method", overflow="fold", min_width=12)
    for head in ("accuracy", "bytes", "simulated"):
        table.add_column(head, justify="right", no_wrap=True)
    if comparison.target:
        table.add_column(f"to {comparison.target:g}", justify="right", no_wrap=True)
    top = max((row["accuracy"] for row in rows if row["accuracy"] is not None), default=None)
    for row in rows:
        told = format_number(row["accuracy"], 3) + (f" ± {row['spread']:.3f}" if row["spread"] is not None else "")
        cells = [row["method"], f"[bold]{told}[/bold]" if row["accuracy"] == top else told]
        cells += [format_size(row["bytes"]), format_seconds(row["sim_seconds"])]
        if comparison.target:
            cells.append(format_cost_to_target(row))
        table.add_row(*cells)
    return table


def make_sheet_tables(sheet) -> list[Table | Text]:
    """A paper's table, one part per column, and the remarks that belong to it."""
    parts: list[Table | Text] = [Text(sheet.table.heading, style="bold")]
    for name, heads, lines in sheet.make_sections():
        table = Table(title=Text(name), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for number, head in enumerate(heads):
            table.add_column(Text(head), justify="right" if number else "left", no_wrap=True)
        for line in lines:
            table.add_row(*map(Text, line))
        parts.append(table)
    return [*parts, *(Text(remark, style="dim") for remark in sheet.remarks)]


def format_cost_to_target(row: dict[str, Any]) -> str:
    """The mean over the seeds that reached it, and how many did where not all of them."""
    if not row["reached"]:
        return "not reached"
    told = f"{row['rounds_to_target']:.0f} rounds, {format_size(row['bytes_to_target'])}"
    return told if row["reached"] == row["seeds"] else f"{row['reached']}/{row['seeds']}: {told}"


def make_listing(what: str, files: tuple[str, ...]) -> Table:
    """One row per name with the first line of its description."""
    from shoal.data.dataset import DATASETS
    from shoal.data.sources import SOURCES
    from shoal.data.splits import SPLITS
    from shoal.fleet.fleets import FLEET_FORMS
    from shoal.reproduce.table_file import list_table_titles

    known: dict[str, Callable[[], dict[str, str]]] = {
        "methods": lambda: describe_methods(files),
        "data": lambda: (
            {name: read_first_sentence(thing) for name, thing in DATASETS.items()}
            | {name: source.doc for name, source in SOURCES.items()}
        ),
        "models": describe_models,
        "splits": lambda: {name: read_first_sentence(function) for name, (function, _, _) in SPLITS.items()},
        "tables": lambda: {escape(name): escape(title) for name, title in list_table_titles().items()},
        "fleets": lambda: {form: (about or "").splitlines()[0] for form, about in FLEET_FORMS.values()},
    }
    if what not in known:
        raise unknown_name_error("list", what, known)
    table = Table(show_header=False, box=None)
    for name, about in known[what]().items():
        table.add_row(f"[bold]{name}[/bold]", about)
    return table


def describe_models() -> dict[str, str]:
    """Models with their size and the cost of a pass, on 3x32x32 and 10 classes unless the model says otherwise."""
    from shoal.models import MODELS, describe_model

    found = {}
    for name, make in MODELS.items():
        parameters, macs = describe_model(name)
        found[name] = f"{parameters:,} parameters, {macs:,} MACs. {read_first_sentence(make)}"
    return found


def describe_methods(files: tuple[str, ...]) -> dict[str, str]:
    """Parts with their values, then presets."""
    from shoal.parts import PRESETS, find_shipped_parts
    from shoal.plugins.load import load_packaged_parts, load_part_files

    found = {}
    for name, part in (find_shipped_parts() | load_part_files(files) | load_packaged_parts()).items():
        values = ", ".join(f"{f.name}={f.default}" for f in fields(part))
        found[f"{name}({values})" if values else name] = read_first_sentence(part)
    return found | {name: f"= {expression or 'the empty list of parts'}" for name, expression in PRESETS.items()}


def read_first_sentence(thing: Any) -> str:
    """The first sentence of what is said about it, however many lines it takes."""
    first = " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split())
    sentence, dot, _ = first.partition(". ")
    return sentence + dot.strip()
