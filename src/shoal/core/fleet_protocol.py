"""What the round asks of a simulated fleet: seconds and joules of a device, and which devices are available."""

from typing import NamedTuple, Protocol

import numpy as np


class DeviceTimes(NamedTuple):
    """Simulated seconds of a device in a round."""

    down: float
    compute: float
    up: float

    @property
    def total(self) -> float:
        return self.down + self.compute + self.up


class DeviceCapability(Protocol):
    """What one device can do: how long, and how many joules, from bytes and multiply-accumulates."""

    def estimate_times(self, down: int, macs: int, up: int) -> DeviceTimes: ...

    def estimate_joules(self, down: int, macs: int, up: int) -> float: ...


class Fleet(Protocol):
    """What all devices can do, round by round, and which of them are there (None: all)."""

    def get_profile(self, device: int, round: int) -> DeviceCapability: ...

    def get_available_mask(self, round: int) -> np.ndarray | None: ...
