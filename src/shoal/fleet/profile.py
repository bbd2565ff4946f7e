"""Fleets: what devices can do, and so how long a round takes in simulated seconds."""

from dataclasses import dataclass

from shoal.core.errors import unknown


@dataclass(frozen=True)
class Profile:
    """One device: multiply-accumulates a second, and the link's megabits a second each way."""

    macs: float
    down: float
    up: float

    def seconds(self, down: int, macs: int, up: int) -> float:
        """Download, compute, upload, one after the other."""
        return down * 8e-6 / self.down + macs / self.macs + up * 8e-6 / self.up


@dataclass(frozen=True)
class Uniform:
    """Every device alike: 1 G multiply-accumulates a second, 100 Mbit/s down, 20 Mbit/s up."""

    profile: Profile = Profile(1e9, 100.0, 20.0)

    def seconds(self, device: int, round: int, down: int, macs: int, up: int) -> float:
        return self.profile.seconds(down, macs, up)


FLEETS = {"uniform": Uniform}


def parse_fleet(name: str) -> Uniform:
    if name not in FLEETS:
        raise unknown("fleet", name, FLEETS)
    return FLEETS[name]()
