"""What the round asks of a simulated fleet: seconds and joules of a device, and which devices are available."""

from typing import NamedTuple, Protocol

import numpy as np


class DeviceTimes(NamedTuple):
    """Simulated seconds that a device spends downloading, computing and uploading in a round."""

    down: float
    compute: float
    up: float

    @property
    def total(self) -> float:
        return self.down + self.compute + self.up


class DeviceCapability(Protocol):
    """The seconds and joules that a device needs for bytes `down` and `up` and for multiply-accumulates `macs`."""

    def estimate_times(self, down: int, macs: int, up: int) -> DeviceTimes: ...

    def estimate_joules(self, down: int, macs: int, up: int) -> float: ...


class Fleet(Protocol):
    """The capability of every device in every round, and which devices are available."""

    def get_profile(self, device: int, round: int) -> DeviceCapability: ...

    def get_available_mask(self, round: int) -> np.ndarray | None:
        """One boolean per device; None when all are available."""
        ...
