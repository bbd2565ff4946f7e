"""Fleets that a program gives as objects: the speed or the profile of each device, or an object of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, describe_error
from shoal.fleet.profile import DeviceProfile

UNIFORM = DeviceProfile()
FORMS = (
    "Give a list with the speed of each device (1.0 is that of `uniform`), a list of shoal.DeviceProfile, or an object "
    "with get_profile(device, round)."
)


@dataclass(frozen=True)
class ListedFleet:
    """A fleet whose devices are listed, one profile each; they are always available."""

    profiles: tuple[DeviceProfile, ...]

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        return self.profiles[device]

    def get_available_mask(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True, eq=False)
class GivenFleet:
    """A user's own object with `get_profile(device, round)`, and with `get_available_mask(round)` if it has one."""

    fleet: Any

    def get_profile(self, device: int, round: int) -> Any:
        try:
            profile = self.fleet.get_profile(device, round)
        except Exception as error:
            raise fleet_error(f"get_profile({device}, {round}) raises {describe_error(error)}") from error
        if not all(callable(getattr(profile, name, None)) for name in ("estimate_times", "estimate_joules")):
            raise fleet_error(f"get_profile({device}, {round}) gives a {type(profile).__name__}")
        return profile

    def get_available_mask(self, round: int) -> np.ndarray | None:
        if not hasattr(self.fleet, "get_available_mask"):
            return None
        try:
            mask = self.fleet.get_available_mask(round)
            return None if mask is None else np.asarray(mask, dtype=bool)
        except Exception as error:
            raise fleet_error(f"get_available_mask({round}) raises {describe_error(error)}") from error


HANDED_OVER_FLEETS: dict[str, ListedFleet | GivenFleet] = {}
"""Fleets that a program gave as objects; they live as long as it does."""


def build_user_fleet(given: Any) -> ListedFleet | GivenFleet:
    """The fleet of an object; what is none is refused."""
    if isinstance(given, (ListedFleet, GivenFleet)):
        return given
    if isinstance(given, (Sequence, np.ndarray)) and not isinstance(given, str):
        return ListedFleet(tuple(make_profile(number, thing) for number, thing in enumerate(given)))
    if not callable(getattr(given, "get_profile", None)):
        raise ShoalError("bad-value", f"A {type(given).__name__} is no fleet.", FORMS)
    fleet = GivenFleet(given)
    fleet.get_profile(0, 0)
    return fleet


def make_profile(device: int, thing: Any) -> DeviceProfile:
    """The profile of a listed device: as it is, or that of `uniform` with speed and links times a number."""
    if isinstance(thing, DeviceProfile):
        return thing
    try:
        factor = float(thing)
    except (TypeError, ValueError):
        raise ShoalError("bad-value", f"The fleet has {thing!r:.40} for device {device}.", FORMS) from None
    if not (isfinite(factor) and 1e-9 <= factor <= 1e9):
        raise ShoalError("bad-value", f"The speed of device {device} is {factor:g}.", "Give one above 0, such as 0.5.")
    return DeviceProfile(UNIFORM.macs * factor, UNIFORM.down * factor, UNIFORM.up * factor)


def find_given_fleet(name: str, devices: int) -> ListedFleet | GivenFleet:
    """The fleet that the program gave under this name of recipes, if it has so many devices."""
    if name not in HANDED_OVER_FLEETS:
        problem = "The recipe names a fleet that a Python program had made."
        raise ShoalError("no-data", problem, "It went with the program: give it again, by fleet=...")
    fleet = HANDED_OVER_FLEETS[name]
    if isinstance(fleet, ListedFleet) and len(fleet.profiles) != devices:
        problem = f"The fleet lists {len(fleet.profiles)} devices, and there are {devices}."
        raise ShoalError("bad-value", problem, f"List each device once, or write devices={len(fleet.profiles)}.")
    return fleet


def fleet_error(why: str) -> ShoalError:
    advice = "Correct it there: it gives a shoal.DeviceProfile, or another object that estimates times and joules."
    return ShoalError("bad-part", f"The fleet cannot be used: {why}.", advice)
