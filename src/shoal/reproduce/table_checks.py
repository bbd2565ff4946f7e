"""Checks of what stands in the file of a table: what is wrong is refused in one sentence."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.reproduce.table import Keys, make_folder_name
from shoal.runs.recipe import Recipe

RESERVED = {"method": "Write it as `run` of a row", "out": "Give it as --out"}
Check = tuple[Callable[[Any], bool], str, Any]
"""Whether a value will do, what is wanted, and what holds when nothing is given (None: something must be)."""


def is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= 2000


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value)) and all(map(is_text, value.values()))


def are_expressions(value: Any) -> bool:
    """One expression, or one for each column."""
    return is_text(value) or is_text_mapping(value)


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and isfinite(value)


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


def is_number_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(is_text(k) and is_number(v) for k, v in value.items())


def are_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number_mapping, value.values()))


def is_figure_filter(value: Any) -> bool:
    return is_text_mapping(value) and set(value) <= {"dataset", "model", "setting"}


def is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= 1000


NAME: Check = (lambda v: is_text(v) and bool(make_folder_name(v)), "a name with a letter or digit in it", None)
TEXT: Check = (is_text, "a text of one line", "")
TEXTS: Check = (are_texts, "a list of texts", ())
KEYS: Check = (are_recipe_keys, "a table of recipe keys", {})


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


def bad_table_error(problem: str, advice: str) -> ShoalError:
    return ShoalError("bad-recipe", f"{problem}.", f"{advice}.")
