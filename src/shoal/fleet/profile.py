"""The speed, link and energy of one device, and the simulated seconds and joules that a round costs it."""

from dataclasses import dataclass
from math import inf

from shoal.core.fleet_protocol import DeviceTimes


@dataclass(frozen=True)
class DeviceProfile:
    """Multiply-accumulates a second, and the link's megabits (10^6 bits) a second each way.

    Some papers give the seconds that a device computes in a round instead of its speed: `seconds`, where it is given,
    takes the place of `macs`.
    Energy is optional: joules per multiply-accumulate and per byte sent or received. `memory` is RAM in megabytes, for
    parts that fit a device's share of the model to it; nothing else looks at it.
    """

    macs: float = 1e9
    down: float = 100.0
    up: float = 20.0
    seconds: float | None = None
    joules_mac: float = 0.0
    joules_byte: float = 0.0
    memory: float = inf

    def estimate_times(self, down: int, macs: int, up: int) -> DeviceTimes:
        """Seconds for `down` bytes, `macs` multiply-accumulates and `up` bytes, one after the other."""
        compute = macs / self.macs if self.seconds is None else self.seconds
        return DeviceTimes(down * 8e-6 / self.down, compute, up * 8e-6 / self.up)

    def estimate_joules(self, down: int, macs: int, up: int) -> float:
        """Joules for `down` bytes, `macs` multiply-accumulates and `up` bytes."""
        return macs * self.joules_mac + (down + up) * self.joules_byte
