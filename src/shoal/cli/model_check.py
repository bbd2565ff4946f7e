"""The command `check`: tries a model on data and says what it is, what it costs and which methods can train it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from shoal.cli.common_flags import Json, Sets
from shoal.cli.console import make_console
from shoal.cli.recipe_flags import resolve_recipe
from shoal.core.errors import ShoalError
from shoal.display.quantities import format_count

if TYPE_CHECKING:
    from shoal.runs.model_check import ModelCheck


def check_command(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model of `shoal list models`, hf:FOLDER, or FILE.py:NAME.")
    ],
    file: Annotated[Path | None, typer.Option("--recipe", help="A recipe; flags go over it.")] = None,
    sets: Sets = None,
    as_json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Try a model: does it run, what does it cost, which methods can train it.

    It is tried on the data of the recipe (--data), with every method, or with the one that --method names.
    """
    from shoal.runs.model_check import check_model

    if "model" in given:
        raise ShoalError("bad-value", "check has no --model.", "Name the model first: shoal check lenet.")
    recipe = resolve_recipe(file, sets, given).with_values(model=name)
    asked = (recipe.method,) if recipe.method != "fedavg" or "method" in given else ()
    check = check_model(recipe, asked)
    if as_json:
        typer.echo(json.dumps(check.to_dict()))
    else:
        for table in make_check_tables(check):
            make_console().print(table)
    for trial in check.methods if asked else ():
        if not trial.trains:
            raise ShoalError(trial.kind, trial.reason, trial.advice)


def make_check_tables(check: "ModelCheck") -> list[Table | Text]:
    """What was found about the model, then the methods: those that train it, and by reason those that do not."""
    facts = Table(title=check.model, show_header=False, title_justify="left")
    for name, value in list_facts(check):
        facts.add_row(name, Text(value))
    able = [trial.method for trial in check.methods if trial.trains]
    slow = [trial.method for trial in check.methods if trial.trains and not trial.vectorised]
    methods = Table(title="methods", title_justify="left")
    methods.add_column("what")
    methods.add_column("number", justify="right")
    methods.add_column("methods")
    if able:
        methods.add_row("train it", str(len(able)), Text(", ".join(able)))
    if slow and check.is_vectorised:
        methods.add_row("of these, one device after the other", str(len(slow)), Text(", ".join(slow)))
    for cause, trials in check.group_refusals().items():
        names = ", ".join(trial.method for trial in trials)
        methods.add_row(Text(f"refused: {cause}"), str(len(trials)), Text(names))
    return [facts, methods]


def list_facts(check: "ModelCheck") -> list[tuple[str, str]]:
    """The rows about the model itself; what it does not have is left out."""
    seconds = ", ".join(f"{1000 * value:.3g} ms on {engine}" for engine, value in check.step_seconds.items())
    vectorised = "yes" if check.is_vectorised else f"no, it {check.obstacle}; devices train one after the other"
    rows = [
        ("data", f"{check.data}: samples of {check.inputs}, {check.outputs} outputs, task {check.task}"),
        ("parameters", f"{check.parameters:,}"),
        ("multiply-accumulates", f"{format_count(check.macs)} for a sample forward"),
        ("a local step", f"{seconds} (a device, batch {check.batch})"),
        ("vectorised", vectorised),
        ("axes", ", ".join(f"{name} ({size})" for name, size in check.axes.items()) or "none"),
        ("blocks", ", ".join(check.blocks) or "none"),
    ]
    further = {
        "frozen": f"{check.frozen:,} numbers that never change" if check.frozen else "",
        "buffers": f"{check.buffers:,} numbers that travel and are not trained" if check.buffers else "",
        "tied": ", ".join(f"{name} is {first}" for name, first in check.tied.items()),
        "batch norm": "a sample's output depends on its batch: at least 2 samples" if check.mixes_batch else "",
        "dropout": "yes" if check.has_dropout else "",
    }
    return [*rows, *((name, text) for name, text in further.items() if text)]
