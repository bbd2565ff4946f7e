"""Recipes from outside: TOML files, and `key=value` words of the command line."""

import tomllib
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.runs.recipe import DEFAULTS
from shoal.runs.recipe_values import MAPPINGS, parse_value

COMPARISON_FILE = "compare.toml"
"""The file in a comparison's folder with its methods and seeds, and the recipe that its runs share."""
TUNING_FILE = "tune.toml"
"""The file in a tuning's folder with its methods, search space, tries and seeds, and the recipe that its runs share."""
MAX_RECIPE_BYTES = 1 << 16
"""The largest recipe file in bytes; to parse a hostile one of a megabyte could take minutes."""


def read_recipe_file(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML recipe file, not yet checked against the fields of a recipe."""
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise ValueError(f"it has more than {MAX_RECIPE_BYTES} bytes")
        keys = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        advice = "Check the path." if path.suffix else f"Check the path; a method is named by --method {path}."
        raise ShoalError("bad-recipe", f"{path} cannot be read: {error.strerror}.", advice) from error
    except (ValueError, RecursionError) as error:
        reason = str(error)[:120]
        raise ShoalError(
            "bad-recipe", f"{path} is not a TOML file: {reason}.", "Write one `key = value` per line."
        ) from error
    nested = [k for k, v in keys.items() if isinstance(v, dict) and k not in MAPPINGS]
    if nested:
        raise ShoalError(
            "bad-recipe", f"{path} has a table [{nested[0]}].", "A recipe has no tables, only `key = value` lines."
        )
    return keys


def parse_recipe_pairs(pairs: list[str], example: str = "-s rounds=50") -> dict[str, Any]:
    """`key=value` words, as they follow -s on the command line; the field's type decides how a value is read."""
    texts = split_pairs(pairs, example)
    return {key: parse_value(key, text, DEFAULTS[key]) if key in DEFAULTS else text for key, text in texts.items()}


def split_pairs(pairs: list[str], example: str = "-s rounds=50") -> dict[str, str]:
    """The text of each key in `key=value` words; the last about a key wins, and `example` shows how to write one."""
    texts: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            problem = f"{pair[:80]!r} is not of the form key=value."
            raise ShoalError("bad-recipe", problem, f"Write for example {example}.")
        texts[key.strip().replace("-", "_")] = value.strip()
    return texts
