"""Values of recipe keys: checked against their key's type, parsed from the command line, written as TOML."""

import json
from collections.abc import Mapping
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Any

from shoal.core.errors import ShoalError

WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list of texts"}
"""Words for what a key takes, by the type of its default."""
EXAMPLES = {bool: True, str: "...", tuple: ("...", "...")}
"""Example values for keys whose default is empty, by type."""
AMOUNTS = ("epochs", "steps")
"""Keys with text such as 1-5, where a plain number will do as well."""
NAMES = ("label",)
"""Keys with texts such as a,b, where a list of names will do as well."""
WORD_LISTS = ("metrics",)
"""Keys with a list of words, each of which may be several with commas between them: --metrics auroc,f1_macro."""
MAPPINGS = ("lr_groups",)
"""Keys with text such as head.*=10, where a table of names and numbers will do as well."""


def fit_value(key: str, value: Any, default: Any) -> Any:
    """A value from Python or TOML in its key's type; text for a number, or a bool for an int, is refused."""
    kind = type(default)
    try:
        if key in MAPPINGS and isinstance(value, Mapping):
            return ",".join(f"{name}={number}" for name, number in value.items())
        if key in AMOUNTS and isinstance(value, (list, tuple)) and len(value) > 1:
            return ",".join(str(number) for number in value)
        if key in NAMES and isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
            return ",".join(value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is tuple and isinstance(value, (str, list, tuple)):
            texts = value.split(",") if isinstance(value, str) else value
            if all(isinstance(text, str) for text in texts):
                texts = ",".join(texts).split(",") if key in WORD_LISTS else texts
                return tuple(text for text in texts if text)
        if kind is str and isinstance(value, (str, PathLike)):
            path = fspath(value)
            return path if isinstance(path, str) else path.decode()
        if isinstance(value, Real) and not isinstance(value, bool):
            if kind is float:
                return float(value)
            if kind is int and isinstance(value, Integral):
                return int(value)
            if key in AMOUNTS:
                return repr(int(value) if isinstance(value, Integral) else float(value))
    except (ValueError, OverflowError):
        pass
    raise wrong_type_error(key, value, default)


def parse_value(key: str, text: str, default: Any) -> Any:
    """The value of a key from the text that the command line gives."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(default)(text) if isinstance(default, (int, float)) else fit_value(key, text, default)
    except (ValueError, KeyError):
        raise bad_value_error(key, text, f"{WANTED[type(default)]}, like {format_toml(default)}") from None


def wrong_type_error(key: str, value: Any, default: Any) -> ShoalError:
    """The error for a value of another type than its key's, with what to write instead."""
    kind, text = type(default), short_repr(value)
    advice = f"Write for example {key} = {format_toml(default or EXAMPLES.get(kind, default))}."
    if isinstance(value, str):
        text = f"the text {text}"
        try:
            advice = f"Write {key} = {format_toml(parse_value(key, value, default))}, without quotes."
        except ShoalError:
            pass
    elif kind is str and type(value) in (int, float):
        advice = f'Write it in quotes: {key} = "{short_repr(value)}".'
    return ShoalError("bad-value", f"{key} is {text}, and must be {WANTED[kind]}.", advice)


def bad_value_error(key: str, value: Any, wanted: str) -> ShoalError:
    return ShoalError("bad-value", f"{key} is {short_repr(value)}.", f"It must be {wanted}.")


def short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # of a whole number with more digits than Python likes to write
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_toml(value: Any) -> str:
    """A value as a TOML file writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(format_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
