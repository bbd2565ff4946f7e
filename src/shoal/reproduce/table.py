"""Tables of papers: which methods run under which settings, as recipes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import ShoalError
from shoal.data.dataset import DATASETS
from shoal.data.noise import NOISE
from shoal.data.sources import SOURCES
from shoal.runs.recipe import Recipe

SMOKE = {"devices": 6, "sample": 3, "rounds": 2, "steps": "1", "engine": "serial"}
"""What the scale `smoke` makes of any recipe, before the table's own [smoke]."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class TableColumn:
    """One setting: a data set, a model, a target."""

    name: str
    set: Keys
    where: Mapping[str, str]
    """Which rows of published.csv belong here, by its columns."""

    @property
    def folder(self) -> str:
        return make_folder_name(self.name)


@dataclass(frozen=True)
class TableRow:
    """One method as the paper calls it, and as shoal does: one expression, or one per column."""

    method: str
    run: str | Mapping[str, str]
    missing: str
    """Why shoal cannot run it."""
    set: Keys
    table: str
    """The table of the paper that has its figures, where it is another one."""
    published: Mapping[str, Mapping[str, float]]
    """By column and metric: figures that are not in published.csv."""

    @property
    def folder(self) -> str:
        return make_folder_name(self.method)

    def find_expression(self, column: TableColumn) -> str | None:
        return None if self.missing else self.run if isinstance(self.run, str) else self.run.get(column.name)


@dataclass(frozen=True)
class PaperTable:
    """Rows that run in columns; `base` is what all cells share."""

    name: str
    paper: str
    table: str
    title: str
    notes: tuple[str, ...]
    base: Keys
    smoke: Keys
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]

    @property
    def heading(self) -> str:
        """Where it stands in the paper, and what it is about."""
        number = self.table if " " in self.table else f"Table {self.table}" if self.table else ""
        where = ", ".join(filter(None, (self.paper, number)))
        return ": ".join(filter(None, (where, self.title))) or self.name

    def make_recipe(self, column: TableColumn, row: TableRow, scale: str, changes: Keys) -> Recipe:
        """The recipe of a cell: base, then the column, then the row, then the scale, then the changes."""
        keys = {**self.base, **column.set, **row.set}
        if scale == "smoke":
            keys = keys | SMOKE | dict(self.smoke)
            keys["data"] = substitute_noise(str(keys.get("data", Recipe.data)))
        return Recipe().with_values(**keys, method=row.find_expression(column)).with_values(**changes)


def substitute_noise(data: str) -> str:
    """Noise in the shape of a data set that would have to be downloaded."""
    name = data.partition(":")[0]
    if name in DATASETS or name not in SOURCES:
        return data
    if f"noise-{name}" not in NOISE:
        advice = "Give another data set under [smoke]."
        raise ShoalError("no-data", f"There is nothing that could stand in for {name} at the scale smoke.", advice)
    return f"noise-{name}"


def make_folder_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60]
