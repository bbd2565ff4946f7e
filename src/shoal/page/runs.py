"""The runs a report is about: read from their folders, checked, and grouped where only the seed differs."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from shoal.budgets import Budgets
from shoal.core.errors import ShoalError
from shoal.files import damaged, disk_errors
from shoal.history import SUMMED, SUMMED_WHERE_TOLD, History, read_history
from shoal.listing import LIST, listed_in
from shoal.recipe import Recipe
from shoal.store import Folder

METRICS = (
    "accuracy",
    "loss",
    "top3",
    "perplexity",
    "device_mean",
    "device_worst",
    "device_spread",
    "local_risk",
    "class_kl",
)
"""Columns of a history that can be drawn as curves."""
PLACES = ("out", "data_dir", "checkpoint_every", "memory_mb")
"""Recipe keys that say where and how a run was kept, not what it was."""


@dataclass(frozen=True, eq=False)
class Run:
    """One folder."""

    path: Path
    recipe: Recipe
    history: History
    split: dict[str, Any] | None = None
    devices: list[float] | None = None

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seed, under the name they have in the report."""

    label: str
    runs: list[Run]

    @property
    def recipe(self) -> Recipe:
        return self.runs[0].recipe


def groups_in(folders: Sequence[Path]) -> list[Group]:
    """The runs in these folders, by what they ran."""
    kinds: dict[Recipe, list[Run]] = {}
    for run in (read_run(path) for path in dict.fromkeys(p.resolve() for f in folders for p in run_folders(f))):
        same = kinds.setdefault(kind_of(run.recipe), [])
        if len(run.history) and run.recipe.seed not in [r.recipe.seed for r in same]:
            same.append(run)
    kinds = {kind: sorted(runs, key=lambda r: r.recipe.seed) for kind, runs in kinds.items() if runs}
    if not kinds:
        told = ", ".join(map(str, folders)) or "No folder was given: it"
        raise ShoalError("no-run", f"{told} holds no round of any run.", "Give folders of runs or comparisons.")
    return [Group(label, runs) for label, runs in zip(labels(list(kinds)), kinds.values())]


def run_folders(path: Path) -> list[Path]:
    """The folder of a run, or those of a comparison that are there already."""
    if not (path / LIST).is_file():
        return [path]
    try:
        found = [Path(r.out) for own in listed_in(path).runs().values() for r in own]
    except (ShoalError, ValueError) as error:
        raise damaged(path / LIST, getattr(error, "problem", error)) from error
    return [folder for folder in found if (folder / "recipe.toml").is_file()]


def budgets_in(folders: Sequence[Path]) -> Budgets:
    """All budgets at which these comparisons were asked to compare."""
    asked = [listed_in(path).budgets for path in folders if (path / LIST).is_file()]
    return Budgets(tuple(b for own in asked for b in own.seconds), tuple(b for own in asked for b in own.bytes))


def read_run(path: Path) -> Run:
    folder = Folder.open(path, to_write=False)
    try:
        recipe = folder.recipe()
    except ShoalError as error:
        raise damaged(folder.recipe_file, error.problem) from error
    history = read_history(folder.history_file)
    for number, row in enumerate(history.rows):
        with checked(folder.history_file, f"line {number + 1}"):
            check_row(row)
    return Run(path, recipe, history, read_split(path / "split.json"), read_devices(path / "devices.json"))


def check_row(row: dict[str, Any]) -> None:
    """Everything the report draws must be a number; an evaluation may be missing."""
    for column in SUMMED:
        amount(row[column], column)
    for column in SUMMED_WHERE_TOLD:
        amount(row.get(column, 0), column)
    for column in METRICS:
        row[column] = None if row.get(column) is None else finite(row[column], column)
    for column in ("bytes_by", "seconds_by"):
        for key, value in table(row.get(column) or {}, column).items():
            for cause, part in table(value, column).items() if isinstance(value, dict) else [(key, value)]:
                amount(part, f"{column} of {cause}")
    if row.get("per_class") is not None:
        row["per_class"] = [
            None if v is None else finite(v, "per_class") for v in listed(row["per_class"], "per_class")
        ]


def read_split(path: Path) -> dict[str, Any] | None:
    """How samples lie on devices: `labels` (a count per class for each device), and what else the file says."""
    found = read_json(path)
    if found is None or found.get("labels") is None:
        return None
    with checked(path, "the split"):
        labels = [[amount(n, "labels") for n in listed(row, "labels")] for row in listed(found["labels"], "labels")]
        if not labels or not labels[0] or len({len(row) for row in labels}) > 1:
            raise ValueError("labels is not a table of devices and classes")
        split: dict[str, Any] = {"labels": labels, "sizes": [sum(row) for row in labels]}
        for key in ("degrees", "sizes"):
            if found.get(key) is not None:
                split[key] = [amount(n, key) for n in listed(found[key], key)]
                if len(split[key]) < len(labels):
                    raise ValueError(f"{key} has {len(split[key])} devices and labels has {len(labels)}")
        if found.get("degree") is not None:
            split["degree"] = amount(found["degree"], "degree")
        if found.get("server") is not None:
            split["server"] = [amount(n, "server") for n in listed(found["server"], "server")]
        return split


def read_devices(path: Path) -> list[float] | None:
    """The accuracy of every device that has any."""
    found = read_json(path)
    if found is None or found.get("accuracy") is None:
        return None
    with checked(path, "the devices"):
        values = [finite(v, "accuracy") for v in listed(found["accuracy"], "accuracy") if v is not None]
    return [v for v in values if v is not None] or None


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        with disk_errors(path):
            return table(json.loads(path.read_bytes()), "the file")
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error


@contextmanager
def checked(path: Path, where: str) -> Iterator[None]:
    """Whatever is wrong inside is damage to a file."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise damaged(path, f"{where}: {error}") from error


def finite(value: Any, name: str) -> float | None:
    """A number, or nothing where it is not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is not a number")
    return value if isfinite(float(value)) else None


def amount(value: Any, name: str) -> float:
    found = finite(value, name)
    if found is None or found < 0:
        raise ValueError(f"{name} is not an amount")
    return found


def listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return value


def table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a table")
    return value


def kind_of(recipe: Recipe) -> Recipe:
    """The recipe without its seed and its place on a disk."""
    return replace(recipe, seed=0, **{key: getattr(Recipe(), key) for key in PLACES})


def labels(kinds: Sequence[Recipe]) -> list[str]:
    """The method, and where two share one, the values in which they differ."""
    made = []
    for kind in kinds:
        rivals = [asdict(k) for k in kinds if k.method == kind.method]
        own = {key: value for key, value in asdict(kind).items() if any(r[key] != value for r in rivals)}
        made.append(", ".join([kind.method, *(f"{key}={value}" for key, value in own.items())]))
    return made
