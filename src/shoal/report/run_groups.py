"""The runs a report is about: read from their folders, checked, and grouped where only the seed differs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.compare.budgets import Budgets
from shoal.compare.spec import COMPARISON_FILE, read_comparison_file
from shoal.core.errors import ShoalError
from shoal.runs.history import History
from shoal.runs.history_rows import require_amount, require_list, require_number, require_table
from shoal.runs.recipe import Recipe, is_unset
from shoal.runs.session import is_run_over
from shoal.runs.store import RunFolder
from shoal.storage.files import damaged_file_error, explain_disk_errors
from shoal.storage.strict_json import parse_json

log = logging.getLogger("shoal")

PLACES = ("out", "data_dir", "checkpoint_every", "memory_mb")
"""Recipe keys that say where and how a run was kept, not what it was."""


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run as its folder tells it: recipe, history, split, and the accuracy of each device."""

    path: Path
    recipe: Recipe
    history: History
    split: dict[str, Any] | None = None
    devices: list[float] | None = None

    @property
    def accuracy(self) -> float | None:
        return self.history.last("accuracy")

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end, or was stopped for a reason that its history tells."""
        return is_run_over(self.recipe, self.history)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that differ only in their seed, under the name they have in the report."""

    label: str
    runs: list[ReportedRun]

    @property
    def recipe(self) -> Recipe:
        return self.runs[0].recipe


def read_groups(folders: Sequence[Path]) -> list[RunGroup]:
    """The runs in these folders, by what they ran; of two records of one run the longer."""
    kinds: dict[Recipe, list[ReportedRun]] = {}
    empty: list[Path] = []
    doubled: list[tuple[ReportedRun, ReportedRun]] = []
    for run in (read_run(path) for path in dict.fromkeys(p.resolve() for f in folders for p in list_run_folders(f))):
        same = kinds.setdefault(strip_seed_and_place(run.recipe), [])
        if not len(run.history):
            empty.append(run.path)
            continue
        other = next((r for r in same if r.recipe.seed == run.recipe.seed), None)
        if other is not None:
            kept, left = (run, other) if len(run.history) > len(other.history) else (other, run)
            doubled.append((kept, left))
            same[same.index(other)] = kept
        else:
            same.append(run)
    kinds = {kind: sorted(runs, key=lambda r: r.recipe.seed) for kind, runs in kinds.items() if runs}
    if not kinds:
        told = ", ".join(map(str, folders)) or "No folder was given: it"
        raise ShoalError("no-run", f"{told} holds no round of any run.", "Give folders of runs or comparisons.")
    refuse_several_headlines([run for runs in kinds.values() for run in runs])
    for path in empty:
        log.warning("%s has no round yet, and is left out of the report.", path)
    for kept, left in doubled:
        log.warning("%s is left out of the report: it has the same recipe and seed as %s.", left.path, kept.path)
    return [RunGroup(label, runs) for label, runs in zip(make_group_labels(list(kinds)), kinds.values())]


def refuse_several_headlines(runs: Sequence[ReportedRun]) -> None:
    """Raise where runs are judged by different metrics, which no column can hold together."""
    first = runs[0]
    other = next((run for run in runs if run.history.headline != first.history.headline), None)
    if other is not None:
        problem = (
            f"{other.path} is judged by {other.history.headline} and {first.path} by {first.history.headline}, "
            "and a report compares by one metric."
        )
        raise ShoalError("bad-value", problem, "Write a report for each, or run both with one --headline.")


def list_run_folders(path: Path) -> list[Path]:
    """The folder of a run, or those of a comparison that are there already."""
    if not (path / COMPARISON_FILE).is_file():
        return [path]
    try:
        found = [Path(r.out) for own in read_comparison_file(path).make_recipes().values() for r in own]
    except (ShoalError, ValueError) as error:
        raise damaged_file_error(path / COMPARISON_FILE, getattr(error, "problem", error)) from error
    return [folder for folder in found if (folder / "recipe.toml").is_file()]


def read_budgets(folders: Sequence[Path]) -> Budgets:
    """All budgets at which these comparisons were asked to compare."""
    asked = [read_comparison_file(path).budgets for path in folders if (path / COMPARISON_FILE).is_file()]
    return Budgets(tuple(b for own in asked for b in own.seconds), tuple(b for own in asked for b in own.bytes))


def read_run(path: Path) -> ReportedRun:
    folder = RunFolder.open(path, to_write=False)
    try:
        recipe = folder.read_recipe()
    except ShoalError as error:
        raise damaged_file_error(folder.recipe_file, error.problem) from error
    history = folder.read_history()
    return ReportedRun(path, recipe, history, read_split(path / "split.json"), read_devices(path / "devices.json"))


def read_split(path: Path) -> dict[str, Any] | None:
    """How samples lie on devices: `labels` (a count per class for each device), and what else the file says.

    None where samples have no label each, as in text: there is nothing to draw.
    """
    content = read_json(path)
    if content is None or content.get("labels") in (None, []):
        return None
    with raise_as_damaged(path, "the split"):
        labels = [
            [require_amount(n, "labels") for n in require_list(row, "labels")]
            for row in require_list(content["labels"], "labels")
        ]
        if not labels or not labels[0] or len({len(row) for row in labels}) > 1:
            raise ValueError("labels is not a table of devices and classes")
        split: dict[str, Any] = {"labels": labels, "sizes": [sum(row) for row in labels]}
        for key in ("degrees", "sizes"):
            if content.get(key) is not None:
                split[key] = [require_amount(n, key) for n in require_list(content[key], key)]
                if len(split[key]) < len(labels):
                    raise ValueError(f"{key} has {len(split[key])} devices and labels has {len(labels)}")
        if content.get("degree") is not None:
            split["degree"] = require_amount(content["degree"], "degree")
        if content.get("server") is not None:
            split["server"] = [require_amount(n, "server") for n in require_list(content["server"], "server")]
        return split


def read_devices(path: Path) -> list[float] | None:
    """The accuracy of every device that has any: on its own test samples, or else on its labels."""
    content = read_json(path) or {}
    key = "own_tests" if content.get("own_tests") is not None else "accuracy"
    if content.get(key) is None:
        return None
    with raise_as_damaged(path, "the devices"):
        values = require_list(content[key], key)
        return [require_number(v, key) for v in values if v is not None] or None


def read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        with explain_disk_errors(path):
            return require_table(parse_json(path.read_bytes()), "the file")
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path, error) from error


@contextmanager
def raise_as_damaged(path: Path, where: str) -> Iterator[None]:
    """Whatever is wrong inside is damage to a file."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise damaged_file_error(path, f"{where}: {error}") from error


def strip_seed_and_place(recipe: Recipe) -> Recipe:
    """The recipe without its seed and its place on a disk, and with its defaults as they are written today."""
    unset = {f.name: f.default for f in fields(recipe) if is_unset(f, getattr(recipe, f.name))}
    return replace(recipe, **unset | {"seed": 0} | {key: getattr(Recipe(), key) for key in PLACES})


def make_group_labels(kinds: Sequence[Recipe]) -> list[str]:
    """The method, and where two share one, the values in which they differ."""
    labels = []
    for kind in kinds:
        rivals = [asdict(k) for k in kinds if k.method == kind.method]
        differing = {key: value for key, value in asdict(kind).items() if any(r[key] != value for r in rivals)}
        labels.append(", ".join([kind.method, *(f"{key}={value}" for key, value in differing.items())]))
    return labels
