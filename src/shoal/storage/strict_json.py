"""JSON as its standard has it: Python's own reader takes NaN for a number, and of a key given twice keeps the last."""

import json
from typing import Any


def parse_json(content: str | bytes) -> Any:
    """What the text says; a ValueError where it is no JSON, or has a key twice in one object."""
    return json.loads(content, object_pairs_hook=refuse_repeated_keys, parse_constant=refuse_constant)


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice[:40]!r} is there twice")
    return made


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
