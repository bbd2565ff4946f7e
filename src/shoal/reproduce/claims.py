"""Claims of papers: the list in claims.toml of a ledger, and the runs from before the protocols that bear on it."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.reproduce.figures import find_published
from shoal.reproduce.measures import MEASURES, Measure
from shoal.reproduce.table import PaperTable, TableColumn, TableRow
from shoal.reproduce.table_file import read_table, read_toml

CLAIMS_FILE = "claims.toml"
EARLIER_FILE = "earlier.toml"
TESTS = ("higher", "lower", "no worse", "near")
KEYS_OF_CLAIM = ("id", "paper", "where", "says", "table", "columns", "row", "measure", "test")


@dataclass(frozen=True)
class Claim:
    """One claim in one column of a table: the figure of a row, beside others or beside what was published."""

    id: str
    paper: str
    where: str
    says: str
    table: str
    column: str
    row: str
    than: tuple[str, ...]
    measure_name: str
    test: str

    @property
    def measure(self) -> Measure:
        return MEASURES[self.measure_name]

    @property
    def rows(self) -> tuple[str, ...]:
        """Every row whose runs decide the claim."""
        return (self.row, *self.than)


def read_claims(folder: Path) -> list[Claim]:
    """The claims of a ledger, one for each column; none where it has no list."""
    file = folder / CLAIMS_FILE
    if not file.is_file():
        return []
    claims: list[Claim] = []
    for entry in read_toml(file).get("claim", []):
        claims += expand_claim(entry, file)
    names = [(claim.id, claim.column) for claim in claims]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_claim_error(file, f"{twice[0]} is there twice for {twice[1]}")
    return claims


def expand_claim(entry: dict[str, Any], file: Path) -> list[Claim]:
    """An entry of the list as a claim for each of its columns; what is wrong with it is told."""
    what = entry.get("id", "an entry")
    missing = [key for key in KEYS_OF_CLAIM if key not in entry]
    unknown = [key for key in entry if key not in (*KEYS_OF_CLAIM, "than")]
    if missing or unknown:
        found = f"{what} has no {missing[0]}" if missing else f"{what} has the unknown key {unknown[0]}"
        raise bad_claim_error(file, found)
    table = read_table(entry["table"])
    for name, known in ((entry["measure"], MEASURES), (entry["test"], TESTS)):
        if name not in known:
            raise unknown_name_error(f"measure or test of {what}", name, known)
    if (entry["test"] == "near") == bool(entry.get("than")):
        raise bad_claim_error(file, f"{what} needs `than`, or the test near and none")
    return [make_claim(entry, table, column) for column in entry["columns"]]


def make_claim(entry: dict[str, Any], table: PaperTable, column: str) -> Claim:
    than = entry.get("than", [])
    found = find_table_column(table, column)
    find_table_row(table, entry["row"])
    if than == "all":
        measure = MEASURES[entry["measure"]]
        rows = [row for row in table.rows if row.method != entry["row"] and row.find_expression(found)]
        than = [row.method for row in rows if measure.find_published(find_published(table, found, row)) is not None]
    for name in than:
        find_table_row(table, name)
    texts = {key: entry[key] for key in ("id", "paper", "where", "says", "row", "test")}
    return Claim(table=table.name, column=column, than=tuple(than), measure_name=entry["measure"], **texts)


def find_table_column(table: PaperTable, name: str) -> TableColumn:
    known = {column.name: column for column in table.columns}
    if name not in known:
        raise unknown_name_error(f"column of {table.name}", name, known)
    return known[name]


def find_table_row(table: PaperTable, name: str) -> TableRow:
    known = {row.method: row for row in table.rows}
    if name not in known:
        raise unknown_name_error(f"row of {table.name}", name, known)
    return known[name]


@dataclass(frozen=True)
class EarlierRuns:
    """Runs from before the protocols that stand for cells of tables, and in what they differ from them."""

    tables: tuple[str, ...]
    column: str
    differs: str
    page: str
    runs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By row: the file of the ledger and the method in it."""


def read_earlier_runs(folder: Path) -> list[EarlierRuns]:
    """What earlier.toml of a ledger says; nothing where there is none."""
    file = folder / EARLIER_FILE
    if not file.is_file():
        return []
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["earlier"]
    return [
        EarlierRuns(
            tuple(entry["tables"]),
            entry["column"],
            entry["differs"],
            entry["page"],
            {row: (place.partition(":")[0], place.partition(":")[2]) for row, place in entry["runs"].items()},
        )
        for entry in entries
    ]


def bad_claim_error(file: Path, found: str) -> ShoalError:
    return ShoalError("bad-recipe", f"{file} cannot be used: {found}.", "Write it as the other entries are.")
