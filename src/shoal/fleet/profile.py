"""What one device can do, and so how long its part of a round takes in simulated seconds."""

from dataclasses import dataclass
from math import inf

from shoal.core.fleet_protocol import DeviceTimes


@dataclass(frozen=True)
class DeviceProfile:
    """Multiply-accumulates a second, and the link's megabits (10^6 bits) a second each way.

    Some papers give the seconds that a device computes in a round instead of its speed: `seconds` is then that number.
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
        """Download, compute, upload, one after the other."""
        compute = macs / self.macs if self.seconds is None else self.seconds
        return DeviceTimes(down * 8e-6 / self.down, compute, up * 8e-6 / self.up)

    def estimate_joules(self, down: int, macs: int, up: int) -> float:
        return macs * self.joules_mac + (down + up) * self.joules_byte
