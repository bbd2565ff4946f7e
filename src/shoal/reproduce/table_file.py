"""Files of tables: found by name, read, and refused in one sentence where something is wrong with them."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.reproduce.table import Keys, PaperTable, TableColumn, TableRow, make_folder_name
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import MAX_RECIPE_BYTES

SHIPPED = Path(__file__).with_name("tables")
OWN = Path("recipes")
"""Where tables are looked for, below the working folder; those found here go before the shipped ones."""
RESERVED = {"method": "Write it as `run` of a row", "out": "Give it as --out"}


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
        named = [*(row.run if isinstance(row.run, Mapping) else ()), *row.published]
        for column in named:
            if column not in {c.name for c in columns}:
                raise unknown_name_error(f"column for the row {row.method}", column, [c.name for c in columns])
    notes = tuple(top.pop("notes"))
    return PaperTable(name=name, columns=tuple(columns), rows=tuple(rows), notes=notes, **top)


Check = tuple[Callable[[Any], bool], str, Any]
"""Whether a value will do, what is wanted, and what holds when nothing is given (None: something must be)."""


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= 2000


def is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value)) and all(map(is_text, value.values()))


def are_entries(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 200 and all(isinstance(entry, dict) for entry in value)


def are_recipe_keys(value: Any) -> bool:
    """Recipe keys; their values are judged when the recipe is made."""
    for key in value if isinstance(value, dict) else ():
        if key in RESERVED:
            raise bad_table_error(f"{key} cannot be set in a table", RESERVED[key])
        if key not in {f.name for f in fields(Recipe)}:
            raise unknown_name_error("recipe key", key, [f.name for f in fields(Recipe)])
    return isinstance(value, dict)


def are_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(own, dict)
        and all(is_text(k) and type(v) in (int, float) and abs(v) < 1e300 and isfinite(v) for k, v in own.items())
        for own in value.values()
    )


def is_figure_filter(value: Any) -> bool:
    return is_text_mapping(value) and set(value) <= {"dataset", "model", "setting"}


NAME: Check = (lambda v: is_text(v) and bool(make_folder_name(v)), "a name with a letter or digit in it", None)
TEXT: Check = (is_text, "a text of one line", "")
KEYS: Check = (are_recipe_keys, "a table of recipe keys", {})
TABLE: dict[str, Check] = {
    "paper": TEXT,
    "table": TEXT,
    "title": TEXT,
    "notes": (lambda v: isinstance(v, list) and all(map(is_text, v)), "a list of texts", ()),
    "base": KEYS,
    "smoke": KEYS,
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
    "run": (lambda v: is_text(v) or is_text_mapping(v), "a method expression, or one for each column by its name", ""),
    "missing": TEXT,
    "set": KEYS,
    "table": TEXT,
    "published": (are_figures, "numbers by column and metric", {}),
}


def check_keys(keys: Keys, checks: Mapping[str, Check], what: str) -> dict[str, Any]:
    """All keys with their values or what holds without them."""
    for key in keys:
        if key not in checks:
            raise unknown_name_error(f"key of {what}", key, checks)
    for key, (fits, wanted, default) in checks.items():
        if key in keys and not fits(keys[key]):
            raise bad_table_error(f"`{key}` of {what} is {str(keys[key])[:60]!r}", f"It must be {wanted}")
        if key not in keys and default is None:
            raise bad_table_error(f"`{key}` of {what} is not given", f"It must be {wanted}")
    return {key: keys.get(key, default) for key, (_, _, default) in checks.items()}


def refuse_shared_folders(names: list[str], what: str) -> None:
    """Refuse names that would share a folder."""
    seen: dict[str, str] = {}
    for name in names:
        if make_folder_name(name) in seen:
            found = f"Two {what} are called {seen[make_folder_name(name)]!r} and {name!r}, which is too alike"
            raise bad_table_error(found, "Give them different names")
        seen[make_folder_name(name)] = name


def bad_table_error(problem: str, advice: str) -> ShoalError:
    return ShoalError("bad-recipe", f"{problem}.", f"{advice}.")
