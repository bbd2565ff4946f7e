"""Checks of hyper-parameters when a part is made."""

from dataclasses import fields
from math import isfinite

from shoal.core.part import Part


def require(part: Part, rule: str, holds: bool) -> None:
    """Refuse a part whose numbers are not finite or break a rule."""
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    finite = all(isfinite(v) for v in values.values() if isinstance(v, float))
    if not (holds and finite):
        given = ", ".join(f"{k}={v!r}" for k, v in values.items())
        raise ValueError(f"{part.name()} needs {rule}, got {given}")
