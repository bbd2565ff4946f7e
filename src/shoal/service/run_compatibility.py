"""Whether a device knows all that a server's description of a run uses: another version of shoal may have more.

A device that passed over what it does not know would train in another way, and nobody would see it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from inspect import signature
from typing import Any

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.part import POINTS, Part
from shoal.runs.fingerprint import describe_setting

DEVICE_POINTS = tuple(point for point in POINTS if "round" not in signature(getattr(Part, point)).parameters)
"""The points at which parts act on devices; those of the server are given the round."""
CLAIMS_FOR_SERVER = frozenset({"cite", "metrics", "neutral", "reads", "renamed_options", "sets"})
"""What parts say about themselves that changes nothing on a device."""
PART_CLAIMS = tuple(
    name
    for name, kind in Part.__annotations__.items()
    if str(kind).startswith("typing.ClassVar") and name not in CLAIMS_FOR_SERVER
)
"""What parts say about themselves that may change what a device does."""


def describe_device_parts(method: Method) -> dict[str, dict[str, Any]]:
    """By part that concerns devices: its options with their values, the points at which it acts there, its claims."""
    descriptions = {}
    for part in method.parts:
        points = [point for point in DEVICE_POINTS if part.acts_at(point)]
        claims = {name: getattr(part, name) for name in PART_CLAIMS if getattr(part, name) != getattr(Part, name)}
        if points or claims:
            options = {field.name: describe_setting(getattr(part, field.name)) for field in fields(part)}
            claims = {name: describe_setting(value) for name, value in claims.items()}
            descriptions[part.name()] = {"options": options, "points": points, "claims": claims}
    return descriptions


def refuse_unknown_keys(run_description: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a description of a run with a key that this version does not know."""
    unknown = sorted(map(str, set(run_description) - set(known)))
    if unknown:
        raise make_version_error(f"The run is described by {unknown[0][:40]!r}, which this version does not know.")


def refuse_other_parts(run_description: Mapping[str, Any], method: Method) -> None:
    """Refuse a run whose parts have other options or points here than on the server; old servers do not tell them."""
    told, own = run_description.get("device_parts"), describe_device_parts(method)
    if told is None or told == own:
        return
    names = [name for name in own if not isinstance(told, Mapping) or told.get(name) != own[name]]
    name = next(iter(names), "") or next(iter(sorted(set(told) - set(own))), "")
    raise make_version_error(f"The part {name[:40]} is another one on the server than here.")


def make_version_error(problem: str) -> ShoalError:
    return ShoalError("unknown-name", problem, "Install the same version of shoal on both.")
