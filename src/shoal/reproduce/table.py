"""Tables of papers: which methods run under which settings, as recipes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.data.dataset import DATASETS
from shoal.data.noise import NOISE
from shoal.data.sources import SOURCES
from shoal.reproduce.protocol import AUTHORS, FAIR, PROTOCOLS, Expressions, Protocol, expand_choices
from shoal.reproduce.reading import Reading
from shoal.runs.recipe import Recipe

SMOKE = {"devices": 6, "sample": 3, "rounds": 2, "epochs": "1", "steps": "1", "engine": "serial"}
"""What the scale `smoke` makes of any recipe, before the table's own [smoke]."""

Keys = Mapping[str, Any]


@dataclass(frozen=True)
class TableColumn:
    """One setting: a data set, a model, a target."""

    name: str
    set: Keys
    where: Mapping[str, str]
    """Which rows of published.csv belong here, by its columns."""
    origin: str = ""
    """The column of the file that this one is a variant of."""

    @property
    def folder(self) -> str:
        return make_folder_name(self.name)


@dataclass(frozen=True)
class TableRow:
    """One method as the paper calls it, and as shoal does: one expression, or one per column."""

    method: str
    run: Expressions
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
        """What runs in a column; one with a list in braces stands for several."""
        if self.missing:
            return None
        return self.run if isinstance(self.run, str) else self.run.get(column.origin or column.name)

    def list_choices(self, column: TableColumn) -> tuple[str, ...]:
        """The expressions that run in a column: one, those of a list, or none."""
        expression = self.find_expression(column)
        return () if expression is None else expand_choices(expression)


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
    fair: Protocol = Protocol()
    tuned: Mapping[str, Expressions] = field(default_factory=dict)
    """By method, the expression that tuning on validation data found; it runs under `fair`."""
    authors: Protocol | None = None
    protocol: Protocol = Protocol()
    """The one that it is run and read by."""

    def apply_protocol(self, name: str) -> "PaperTable":
        """The table as a protocol has it: its recipe keys, expressions and further columns."""
        if name not in PROTOCOLS:
            raise unknown_name_error("protocol", name, PROTOCOLS)
        protocol = self.fair if name == FAIR else self.authors
        if protocol is None:
            problem = f"{self.name} has no protocol of its authors: how they ran it is not known beyond their paper."
            raise ShoalError("bad-value", problem, "Use --protocol fair.")
        runs = {**protocol.run, **(self.tuned if name == FAIR else {})}
        rows = tuple(row if row.missing else replace(row, run=runs.get(row.method, row.run)) for row in self.rows)
        base = {**self.base, **protocol.set}
        columns = []
        for column in self.columns:
            columns.append(column)
            for model in protocol.variants.get({**base, **column.set}.get("model", ""), ()):
                own = {**column.set, "model": model}
                columns.append(replace(column, name=f"{column.name}, {model}", set=own, origin=column.name))
        return replace(self, base=base, rows=rows, columns=tuple(columns), protocol=protocol)

    @property
    def other_protocol(self) -> str:
        """The name of the other protocol; "" where there is none."""
        if self.protocol.name == AUTHORS:
            return FAIR
        return AUTHORS if self.authors is not None else ""

    def make_reading(self, column: TableColumn, row: TableRow) -> Reading:
        """How the figures of a cell are read."""
        whole = next((c for c in self.columns if c.name == column.origin), column)
        keys = {**self.base, **whole.set, **row.set}
        return self.protocol.make_reading(str(keys.get("model", "")), str(keys.get("data", "")), row.method)

    @property
    def heading(self) -> str:
        """Where it stands in the paper, and what it is about."""
        number = self.table if " " in self.table else f"Table {self.table}" if self.table else ""
        where = ", ".join(filter(None, (self.paper, number)))
        return ": ".join(filter(None, (where, self.title))) or self.name

    def make_recipe(self, column: TableColumn, row: TableRow, scale: str, changes: Keys, choice: int = 0) -> Recipe:
        """The recipe of a cell: base, then the column, then the row, then the scale, then the changes.

        Of a list of expressions it is that of the one with the number `choice`.
        """
        keys = {**self.base, **column.set, **row.set}
        if scale == "smoke":
            keys = keys | SMOKE | dict(self.smoke)
            keys["data"] = substitute_noise(str(keys.get("data", Recipe.data)))
        return Recipe().with_values(**keys, method=row.list_choices(column)[choice]).with_values(**changes)


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
