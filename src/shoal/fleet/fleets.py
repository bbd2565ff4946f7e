"""Simulated fleets: speed, link and availability of each device in each round, and the texts that name them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.streams import RandomStreams
from shoal.fleet.profile import DeviceProfile
from shoal.fleet.trace import TraceFleet
from shoal.fleet.user_fleet import GivenFleet, ListedFleet, find_given_fleet


@dataclass(frozen=True)
class UniformFleet:
    """Every device alike: 1 G multiply-accumulates a second, 100 Mbit/s down, 20 Mbit/s up, or uniform:MACS:DOWN:UP."""

    profile: DeviceProfile = DeviceProfile()

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        return self.profile

    def get_available_mask(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class RangeFleet:
    """Links of 40 to 280 Mbit/s and LOW to HIGH seconds of computing, drawn anew every 10 rounds (fedbr:1.3:6.7)."""

    streams: RandomStreams
    low: float = 1.3
    high: float = 6.7

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        draw = self.streams.make_numpy_generator("fleet", round // 10, device)
        link = draw.uniform(40, 280)
        return DeviceProfile(down=link, up=link, seconds=draw.uniform(self.low, self.high))

    def get_available_mask(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class TierFleet:
    """Kinds of devices by their speed relative to uniform, equally likely: tiers:4:1:0.25."""

    streams: RandomStreams
    factors: tuple[float, ...] = (4.0, 1.0, 0.25)

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        factor = self.factors[int(self.streams.make_numpy_generator("fleet", 0, device).integers(len(self.factors)))]
        return DeviceProfile(1e9 * factor, 100 * factor, 20 * factor)

    def get_available_mask(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class IntermittentFleet:
    """Any fleet whose devices are there in a round only with the chance P: ?P behind its text, as in 5g?0.8."""

    inner: "AnyFleet"
    streams: RandomStreams
    devices: int
    chance: float

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        return self.inner.get_profile(device, round)

    def get_available_mask(self, round: int) -> np.ndarray | None:
        available = self.streams.make_numpy_generator("available", round).random(self.devices) < self.chance
        inner_available = self.inner.get_available_mask(round)
        return available if inner_available is None else available & inner_available


AnyFleet = UniformFleet | RangeFleet | TierFleet | IntermittentFleet | TraceFleet | ListedFleet | GivenFleet
FLEET_FORMS = {
    "uniform": ("uniform or uniform:MACS:DOWN:UP, in operations and Mbit a second", UniformFleet.__doc__),
    "5g": ("5g", "Every device on the 5G link that FedBIAD measured: 110.6 Mbit/s down, 14.0 Mbit/s up."),
    "fedbr": ("fedbr or fedbr:LOW:HIGH, in seconds", RangeFleet.__doc__),
    "fedbr-even": ("fedbr-even or fedbr-even:SECONDS", "The means of fedbr for every device: 160 Mbit/s, 4 seconds."),
    "tiers": ("tiers or tiers:FACTOR:FACTOR:...", TierFleet.__doc__),
    "trace": ("trace:FILE.csv", TraceFleet.__doc__),
}


def parse_fleet(text: str, streams: RandomStreams, devices: int, rounds: int) -> AnyFleet:
    """The fleet that a text like `fedbr:2.0:10.0` or `5g?0.9` names, or that the program gave under this name."""
    body, has_chance, chance = text.partition("?")
    name, *arguments = body.split(":")
    if name.startswith("own-"):
        return find_given_fleet(name, devices)
    if name not in FLEET_FORMS:
        raise unknown_name_error("fleet", name, FLEET_FORMS)
    try:
        if name == "trace":
            fleet: AnyFleet = TraceFleet.read(":".join(arguments), devices, rounds)
        else:
            values = [parse_positive(value) for value in arguments]
            fleet = make_fleet(name, values, streams)
        return IntermittentFleet(fleet, streams, devices, parse_probability(chance)) if has_chance else fleet
    except (ValueError, TypeError):
        advice = f"Write {FLEET_FORMS[name][0]}; ?P behind it makes each device available with the chance P."
        raise ShoalError("bad-value", f"The fleet {text[:80]!r} cannot be read.", advice) from None


def make_fleet(name: str, values: list[float], streams: RandomStreams) -> AnyFleet:
    """The fleet of this kind; values that are not given have the defaults of its kind."""
    makers: dict[str, Callable[..., AnyFleet]] = {
        "uniform": lambda macs=1e9, down=100.0, up=20.0: UniformFleet(DeviceProfile(macs, down, up)),
        "5g": lambda: UniformFleet(DeviceProfile(down=110.6, up=14.0)),
        "fedbr": lambda low=1.3, high=None: make_range_fleet(streams, low, high),
        "fedbr-even": lambda seconds=4.0: UniformFleet(DeviceProfile(down=160.0, up=160.0, seconds=seconds)),
        "tiers": lambda *factors: TierFleet(streams, factors or (4.0, 1.0, 0.25)),
    }
    return makers[name](*values)


def make_range_fleet(streams: RandomStreams, low: float, high: float | None) -> RangeFleet:
    """Seconds from `low` to `high`, or to the highest of the default; a ValueError where `low` is above `high`."""
    if high is not None and low > high:
        raise ValueError
    return RangeFleet(streams, low, max(low, RangeFleet.high) if high is None else high)


def parse_positive(text: str) -> float:
    """A number from 1e-9 to 1e18; a ValueError for any other text."""
    value = float(text)
    if not 1e-9 <= value <= 1e18:
        raise ValueError
    return value


def parse_probability(text: str) -> float:
    """A number above 0 and up to 1; a ValueError for any other text."""
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value
