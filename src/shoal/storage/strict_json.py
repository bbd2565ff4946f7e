"""A strict JSON parser: Python's own accepts NaN, and keeps only the last of repeated keys."""

import json
from typing import Any


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text; a ValueError where it is no JSON, has NaN or Infinity, or a key twice in one object."""
    return json.loads(content, object_pairs_hook=refuse_repeated_keys, parse_constant=refuse_constant)


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict, if no key is there twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice[:40]!r} is there twice")
    return mapping


def refuse_constant(name: str) -> Any:
    """Raise for NaN, Infinity and -Infinity, which JSON does not have."""
    raise ValueError(f"{name} is no number")
