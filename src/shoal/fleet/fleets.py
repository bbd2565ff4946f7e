"""Fleets: the profiles of all devices, round by round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.streams import RandomStreams
from shoal.fleet.profile import Profile
from shoal.fleet.trace import Trace


@dataclass(frozen=True)
class Uniform:
    """Every device alike: 1 G multiply-accumulates a second, 100 Mbit/s down, 20 Mbit/s up, or uniform:MACS:DOWN:UP."""

    every: Profile = Profile()

    def profile(self, device: int, round: int) -> Profile:
        return self.every

    def available(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class Ranges:
    """Links of 40 to 280 Mbit/s and LOW to HIGH seconds of computing, drawn anew every 10 rounds (fedbr:1.3:6.7)."""

    streams: RandomStreams
    low: float = 1.3
    high: float = 6.7

    def profile(self, device: int, round: int) -> Profile:
        draw = self.streams.make_numpy_generator("fleet", round // 10, device)
        link = draw.uniform(40, 280)
        return Profile(down=link, up=link, seconds=draw.uniform(self.low, self.high))

    def available(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class Tiers:
    """Kinds of devices by their speed relative to uniform, equally likely: tiers:4:1:0.25."""

    streams: RandomStreams
    factors: tuple[float, ...] = (4.0, 1.0, 0.25)

    def profile(self, device: int, round: int) -> Profile:
        factor = self.factors[int(self.streams.make_numpy_generator("fleet", 0, device).integers(len(self.factors)))]
        return Profile(1e9 * factor, 100 * factor, 20 * factor)

    def available(self, round: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True)
class Moody:
    """Any fleet whose devices are there in a round only with the chance P: ?P behind its text, as in 5g?0.8."""

    inner: Any
    streams: RandomStreams
    devices: int
    chance: float

    def profile(self, device: int, round: int) -> Profile:
        return self.inner.profile(device, round)

    def available(self, round: int) -> np.ndarray | None:
        there = self.streams.make_numpy_generator("available", round).random(self.devices) < self.chance
        before = self.inner.available(round)
        return there if before is None else there & before


Fleet = Uniform | Ranges | Tiers | Moody | Trace
FORMS = {
    "uniform": ("uniform or uniform:MACS:DOWN:UP, in operations and Mbit a second", Uniform.__doc__),
    "5g": ("5g", "Every device on the 5G link that FedBIAD measured: 110.6 Mbit/s down, 14.0 Mbit/s up."),
    "fedbr": ("fedbr or fedbr:LOW:HIGH, in seconds", Ranges.__doc__),
    "fedbr-even": ("fedbr-even or fedbr-even:SECONDS", "The means of fedbr for every device: 160 Mbit/s, 4 seconds."),
    "tiers": ("tiers or tiers:FACTOR:FACTOR:...", Tiers.__doc__),
    "trace": ("trace:FILE.csv", Trace.__doc__),
}


def parse_fleet(text: str, streams: RandomStreams, devices: int, rounds: int) -> Fleet:
    """The fleet that a text like `fedbr:2.0:10.0` or `5g?0.9` names."""
    body, mark, chance = text.partition("?")
    name, *given = body.split(":")
    if name not in FORMS:
        raise unknown_name_error("fleet", name, FORMS)
    try:
        if name == "trace":
            fleet: Fleet = Trace.read(":".join(given), devices, rounds)
        else:
            values = [positive(value) for value in given]
            fleet = made(name, values, streams)
        return Moody(fleet, streams, devices, share(chance)) if mark else fleet
    except (ValueError, TypeError):
        advice = f"Write {FORMS[name][0]}; ?P behind it makes each device available with the chance P."
        raise ShoalError("bad-value", f"The fleet {text[:80]!r} cannot be read.", advice) from None


def made(name: str, values: list[float], streams: RandomStreams) -> Fleet:
    makers: dict[str, Callable[..., Fleet]] = {
        "uniform": lambda macs=1e9, down=100.0, up=20.0: Uniform(Profile(macs, down, up)),
        "5g": lambda: Uniform(Profile(down=110.6, up=14.0)),
        "fedbr": lambda low=1.3, high=6.7: Ranges(streams, low, max(low, high)),
        "fedbr-even": lambda seconds=4.0: Uniform(Profile(down=160.0, up=160.0, seconds=seconds)),
        "tiers": lambda *factors: Tiers(streams, factors or (4.0, 1.0, 0.25)),
    }
    return makers[name](*values)


def positive(text: str) -> float:
    value = float(text)
    if not 1e-9 <= value <= 1e18:
        raise ValueError
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value
