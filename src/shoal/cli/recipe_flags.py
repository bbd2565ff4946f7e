"""Recipe fields as flags of the command line, and the recipe that a file, `-s key=value` and flags make together."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shoal.core.errors import ShoalError
from shoal.runs.owner_split import split_by_known_owners
from shoal.runs.recipe import DEFAULTS, Recipe
from shoal.runs.recipe_files import parse_recipe_pairs, read_recipe_file

PANELS = {
    "What to run": "method parts data data_dir model task split server_data devices sample rounds seed",
    "Columns of a table": "label owner order missing text_length",
    "Local training": "epochs steps batch accumulate gradient_checkpointing loss label_smoothing focal class_weights "
    "normalise normalise_by augment init",
    "Optimiser": "optimiser lr lr_decay lr_schedule lr_warmup local_lr_schedule local_lr_warmup lr_groups momentum "
    "nesterov beta1 beta2 eps weight_decay clip",
    "When to look": "eval_every metrics validation stratify_validation evaluate_test local_test local_test_of headline "
    "target",
    "When to stop": "until_accuracy patience until_seconds until_bytes until_macs",
    "Where it runs": "engine width threads address compute precision deterministic fleet failures deadline over_select",
    "What is kept": "out keep_best checkpoint_every memory_mb",
}
"""Recipe keys by the panel of the help page that shows their flags."""
METAVARS = {str: "TEXT", int: "N", float: "X", bool: "", tuple: "FILE"}
"""What stands for the value of a flag in the help, by the type of the field's default."""


def add_recipe_flags(command: Callable, only: Collection[str] = ()) -> Callable:
    """Give a command a flag for every recipe field, or `only` these; those in use arrive as the keyword `given`."""
    shown = [f for f in fields(Recipe) if not only or f.name in only]
    own_parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
    panels = {name: panel for panel, names in PANELS.items() for name in names.split()}
    flags = []
    for f in shown:
        kind = list[str] if isinstance(f.default, tuple) else type(f.default)
        name = "--" + f.name.replace("_", "-")
        default = "" if f.default in ("", ()) else f" [dim]\\[{f.default}][/dim]"
        option = typer.Option(
            f"{name}/--no-{name[2:]}" if kind is bool else name,
            help=f.metadata["help"] + default,
            show_default=False,
            metavar=METAVARS[type(f.default)],
            rich_help_panel=panels[f.name],
        )
        annotation = Annotated[kind | None, option]
        flags.append(inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))

    def call_command(**values: Any) -> None:
        given = {f.name: values.pop(f.name) for f in shown}
        command(**values, given={k: v for k, v in given.items() if v not in (None, [])})

    call_command.__signature__ = inspect.Signature([*own_parameters, *flags])  # type: ignore[attr-defined]
    call_command.__doc__, call_command.__name__ = command.__doc__, command.__name__
    return call_command


def resolve_recipe(
    file: Path | None, sets: list[str] | None, given: Mapping[str, Any], varied: Collection[str] = ()
) -> Recipe:
    """The recipe of defaults, then the file, then -s, then flags; the later go over the earlier.

    Data that say whose each sample is are split by owner unless one of these, or a key that is `varied`, says how.
    """
    from_file = read_recipe_file(file) if file else {}
    values = from_file | parse_recipe_pairs(sets or []) | dict(given)
    return Recipe().with_values(**split_by_known_owners(values, varied))


class CommandWithoutRecipeFlags(TyperCommand):
    """A command that takes recipe keys by -s alone, and says so where one is given as a flag of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # they are taken away while they are read
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flag = str(getattr(error, "option_name", ""))  # of an option that there is not
            key = flag.lstrip("-").replace("-", "_")
            if key not in DEFAULTS:
                raise
            following = [word for before, word in zip(words, words[1:]) if before == flag and word[:1] != "-"]
            joined = [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
            value = ([*following, *joined] or ["true" if DEFAULTS[key] is False else "VALUE"])[0]
            problem = f"{ctx.command_path} has no flag {flag}: what it may change is given by -s."
            raise ShoalError("usage", problem, f"Write -s {key}={value}.") from error
