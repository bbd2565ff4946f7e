"""docs/reference/commands.md, written from the commands of the typer application."""

import re
from collections.abc import Iterator
from dataclasses import fields

import click
import typer
from markers import format_cell, format_table
from rich.text import Text

from shoal.cli.commands import app
from shoal.runs.recipe import Recipe

HEAD = """# Commands

<!-- this whole page is written by tools/generate_docs.py (`make generate`) -->

`shoal COMMAND --help` prints the same. An error ends with one of the [exit codes](exit-codes.md).
"""
RECIPE_FLAGS = (
    "It also has a flag for every [key of a recipe](../how-to/recipes.md), with dashes for underscores: "
    "`lr_decay` is `--lr-decay`; keys that are true or false have a `--no-` form as well."
)


def write_command_page() -> str:
    """A section for each command: how it is called, what it does, its arguments and options."""
    return HEAD + "".join(write_command(path, command) for path, command in walk_commands(typer.main.get_command(app)))


def walk_commands(command: click.Command, path: str = "shoal") -> Iterator[tuple[str, click.Command]]:
    """The commands of an application with what is typed to call them, those of groups in their groups."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from walk_commands(inner, f"{path} {name}")
    else:
        yield path, command


def write_command(path: str, command: click.Command) -> str:
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    keys = {f.name for f in fields(Recipe)}
    from_recipe = len(keys & {p.name for p in shown}) == len(keys)
    rows = []
    for parameter in shown:
        if from_recipe and parameter.name in keys:
            continue
        rows.append([format_cell(f"`{format_names(parameter)}`"), format_default(parameter), format_help(parameter)])
    usage = " ".join([path, *command.collect_usage_pieces(click.Context(command))])
    text = f"\n## {path}\n\n```text\n{usage}\n```\n\n{format_markup(command.help or '')}\n"
    text += f"\n{RECIPE_FLAGS}\n" if from_recipe else ""
    return text + (f"\n{format_table(['option', 'default', 'meaning'], rows)}" if rows else "")


def format_names(parameter: click.Parameter) -> str:
    """An argument as it stands in the usage line; an option with its other names and the form of its value."""
    if isinstance(parameter, click.Argument):
        return parameter.make_metavar(click.Context(click.Command("")))
    flag = isinstance(parameter, click.Option) and parameter.is_flag
    value = "" if flag else f" {parameter.make_metavar(click.Context(click.Command('')))}"
    value = re.sub(r"INTEGER( RANGE)?", "N", re.sub(r"FLOAT( RANGE)?", "X", value))
    return ", ".join(parameter.opts) + value


def format_default(parameter: click.Parameter) -> str:
    if parameter.required:
        return "must be given"
    default = parameter.default
    if callable(default) or default in (None, "", False, [], ()) or "Sentinel" in type(default).__name__:
        return ""
    return f"`{default}`"


def format_help(parameter: click.Parameter) -> str:
    return format_cell(format_markup(getattr(parameter, "help", None) or ""))


def format_markup(text: str) -> str:
    """Rich markup as Markdown: bold words as code, dimmed defaults left out."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        styled = Text.from_markup(" ".join(paragraph.split()))
        plain = styled.plain
        for span in sorted(styled.spans, key=lambda span: -span.start):
            inner = plain[span.start : span.end]
            shown = f"`{inner}`" if span.style == "bold" else ""
            plain = plain[: span.start] + shown + plain[span.end :]
        paragraphs.append(plain.strip())
    return "\n\n".join(paragraphs)
