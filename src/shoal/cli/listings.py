"""What `shoal list` shows: methods, data sets, models, tasks, splits, fleets, tables of papers, a sentence for each."""

from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.core.errors import unknown_name_error

MODEL_LIBRARIES = ("torchvision", "timm", "transformers")
"""Packages whose modules can be trained; they are named where they are installed."""


def make_listing(what: str, files: tuple[str, ...]) -> Table:
    """One row for each name of a kind, such as `methods`, with the first sentence of its description."""
    from shoal.core.builtin_tasks import TASKS
    from shoal.data.dataset import DATASETS
    from shoal.data.feature_skew import SKEWS
    from shoal.data.sources import SOURCES
    from shoal.data.splits import SPLITS
    from shoal.fleet.fleets import FLEET_FORMS
    from shoal.reproduce.table_file import list_table_titles

    listings: dict[str, Callable[[], dict[str, str]]] = {
        "methods": lambda: describe_methods(files),
        "data": lambda: (
            {name: read_first_sentence(thing) for name, thing in DATASETS.items()}
            | {name: source.doc for name, source in SOURCES.items()}
        ),
        "models": describe_models,
        "tasks": lambda: {name: f"{task.about}; judged by {task.headline}" for name, task in TASKS.items()},
        "splits": lambda: (
            {name: read_first_sentence(function) for name, (function, _, _) in SPLITS.items()}
            | {f"...+{name}": read_first_sentence(kind) for name, (kind, _, _) in SKEWS.items()}
        ),
        "tables": list_table_titles,
        "fleets": lambda: {form: (about or "").splitlines()[0] for form, about in FLEET_FORMS.values()},
    }
    if what not in listings:
        raise unknown_name_error("list", what, listings)
    table = Table(show_header=False, box=None)
    for name, about in listings[what]().items():
        table.add_row(Text(name, "bold"), about)
    return table


def describe_models() -> dict[str, str]:
    """Models with their size and the cost of a pass, on 3x32x32 and 10 classes unless the model says otherwise."""
    from shoal.models import MODELS, describe_model
    from shoal.models.hf_model import describe_hf_models

    descriptions = {}
    for name, make in MODELS.items():
        parameters, macs = describe_model(name)
        descriptions[name] = f"{parameters:,} parameters, {macs:,} MACs. {read_first_sentence(make)}"
    libraries = [name for name in MODEL_LIBRARIES if find_spec(name)]
    installed = f" Installed to take one from: {', '.join(libraries)}." if libraries else ""
    descriptions["hf:FOLDER"] = describe_hf_models()
    return descriptions | {"FILE.py:NAME": f"A module of your own, which `shoal check FILE.py:NAME` tries.{installed}"}


def describe_methods(files: tuple[str, ...]) -> dict[str, str]:
    """Every part with its options and their defaults, then every preset with the expression it stands for."""
    from shoal.parts import PRESETS, find_shipped_parts
    from shoal.plugins.load import load_packaged_parts, load_part_files

    descriptions = {}
    for name, part in (find_shipped_parts() | load_part_files(files) | load_packaged_parts()).items():
        values = ", ".join(f"{f.name}={f.default}" for f in fields(part))
        descriptions[f"{name}({values})" if values else name] = read_first_sentence(part)
    return descriptions | {name: f"= {expression or 'the empty list of parts'}" for name, expression in PRESETS.items()}


def read_first_sentence(thing: Any) -> str:
    """The first sentence of an object's docstring, in one line."""
    first = " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split())
    sentence, dot, _ = first.partition(". ")
    return sentence + dot.strip()
