"""Files of tables: found by name, read, and refused in one sentence where something is wrong with them."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.reproduce.protocol_file import (
    AUTHORS_SECTION,
    FAIR_SECTION,
    build_authors_protocol,
    build_fair_protocol,
    refuse_lists,
)
from shoal.reproduce.table import Keys, PaperTable, TableColumn, TableRow, make_folder_name
from shoal.reproduce.table_checks import (
    KEYS,
    NAME,
    TEXT,
    TEXTS,
    Check,
    are_entries,
    are_expressions,
    are_figures,
    bad_table_error,
    check_keys,
    is_figure_filter,
)
from shoal.runs.recipe_files import MAX_RECIPE_BYTES

SHIPPED = Path(__file__).with_name("tables")
OWN = Path("recipes")
"""Where tables are looked for, below the working folder; those found here go before the shipped ones."""


def list_tables() -> dict[str, Path]:
    """Every table by its name; a recipe of one run is none."""
    files = [file for place in (SHIPPED, OWN) for file in sorted(place.glob("*.toml"))]
    return {file.stem: file for file in files if is_table_file(file)}


def is_table_file(file: Path) -> bool:
    try:
        return file.stat().st_size <= MAX_RECIPE_BYTES and b"[[row]]" in file.read_bytes()
    except OSError:
        return False


def list_table_titles() -> dict[str, str]:
    """What each table is about; of one that cannot be read, why."""
    titles = {}
    for name in list_tables():
        try:
            titles[name] = read_table(name).heading
        except ShoalError as error:
            titles[name] = error.problem
    return titles


def read_table(name: str) -> PaperTable:
    """A table by its name, or from a file."""
    if name.endswith(".toml"):
        return build_table(Path(name).stem, read_toml(Path(name)))
    known = list_tables()
    if name not in known:
        raise unknown_name_error("table", name, known)
    return build_table(name, read_toml(known[name]))


def read_toml(file: Path) -> dict[str, Any]:
    """The keys of a TOML file with tables in it."""
    try:
        if file.stat().st_size > MAX_RECIPE_BYTES:
            raise ValueError(f"it has more than {MAX_RECIPE_BYTES} bytes")
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShoalError("bad-recipe", f"{file} cannot be read: {error.strerror}.", "Check the path.") from error
    except (ValueError, RecursionError) as error:
        advice = "Start from a copy of a table that works."
        raise ShoalError("bad-recipe", f"{file} is not a TOML file: {str(error)[:120]}.", advice) from error


def build_table(name: str, keys: Keys) -> PaperTable:
    """The table that these keys describe; whatever is wrong with them is told."""
    if "method" in keys:
        raise bad_table_error(f"{name} is the recipe of one run, not a table", f"Use `shoal run {name}.toml`")
    top = check_keys(keys, TABLE, "a table")
    columns = [TableColumn(**check_keys(entry, COLUMN, "a column")) for entry in top.pop("column")]
    rows = [TableRow(**check_keys(entry, ROW, "a row")) for entry in top.pop("row")]
    refuse_shared_folders([c.name for c in columns], "columns")
    refuse_shared_folders([r.method for r in rows], "rows")
    for row in rows:
        if bool(row.run) == bool(row.missing):
            raise bad_table_error(f"The row {row.method} needs either `run` or `missing`", "Give one of the two")
        refuse_lists(row.method, row.run)
        refuse_unknown_columns(
            row.method, [*(row.run if isinstance(row.run, Mapping) else ()), *row.published], columns
        )
    fair, tuned = build_fair_protocol(top.pop("fair"))
    shared = isinstance(top["authors"], str)
    authors = build_authors_protocol(top.pop("authors"))
    for method, run in (*fair.run.items(), *tuned.items(), *(authors.run.items() if authors and not shared else ())):
        if method not in {r.method for r in rows}:
            raise unknown_name_error("row for a protocol", method, [r.method for r in rows])
        refuse_unknown_columns(method, run if isinstance(run, Mapping) else (), columns)
    notes = tuple(top.pop("notes"))
    return PaperTable(
        name=name,
        columns=tuple(columns),
        rows=tuple(rows),
        notes=notes,
        fair=fair,
        tuned=tuned,
        authors=authors,
        protocol=fair,
        **top,
    )


def refuse_unknown_columns(method: str, named: Iterable[str], columns: list[TableColumn]) -> None:
    for column in named:
        if column not in {c.name for c in columns}:
            raise unknown_name_error(f"column for the row {method}", column, [c.name for c in columns])


TABLE: dict[str, Check] = {
    "paper": TEXT,
    "table": TEXT,
    "title": TEXT,
    "notes": TEXTS,
    "base": KEYS,
    "smoke": KEYS,
    "fair": FAIR_SECTION,
    "authors": AUTHORS_SECTION,
    "column": (are_entries, "1 to 200 entries [[column]]", None),
    "row": (are_entries, "1 to 200 entries [[row]]", None),
}
COLUMN: dict[str, Check] = {
    "name": NAME,
    "set": KEYS,
    "where": (is_figure_filter, "texts for dataset, model and setting, as in published.csv", {}),
}
ROW: dict[str, Check] = {
    "method": NAME,
    "run": (are_expressions, "a method expression, or one for each column by its name", ""),
    "missing": TEXT,
    "set": KEYS,
    "table": TEXT,
    "published": (are_figures, "numbers by column and metric", {}),
}


def refuse_shared_folders(names: list[str], what: str) -> None:
    """Refuse names that would share a folder."""
    seen: dict[str, str] = {}
    for name in names:
        if make_folder_name(name) in seen:
            found = f"Two {what} are called {seen[make_folder_name(name)]!r} and {name!r}, which is too alike"
            raise bad_table_error(found, "Give them different names")
        seen[make_folder_name(name)] = name
