"""Populations: which samples each device holds, stored, or drawn from a seed when they are needed."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.core.errors import ShoalError


class Population(Sequence[np.ndarray]):
    """A sequence with the sample numbers of each device; a device may have none."""

    @property
    @abstractmethod
    def sizes(self) -> np.ndarray:
        """The number of samples of each device; not to be written to."""

    @abstractmethod
    def renumber(self, samples: np.ndarray) -> "Population":
        """The same population where sample number i is called `samples[i]`."""


@dataclass(frozen=True, eq=False)
class StoredPopulation(Population):
    """Every sample is on one device: all samples in the order of their devices, and where each device ends."""

    order: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, device: int) -> np.ndarray:  # type: ignore[override]
        device = range(len(self))[device]
        return self.order[self.ends[device - 1] if device else 0 : self.ends[device]]

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def renumber(self, samples: np.ndarray) -> "StoredPopulation":
        return replace(self, order=samples[self.order])


@dataclass(frozen=True, eq=False)
class VirtualPopulation(Population):
    """Any number of devices, each with `size` different samples that follow from the seed and its own number."""

    samples: np.ndarray
    size: int
    devices: int
    seed: int

    def __len__(self) -> int:
        return self.devices

    def __getitem__(self, device: int) -> np.ndarray:  # type: ignore[override]
        key = np.array([self.seed, range(len(self))[device]], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        return self.samples[generator.choice(len(self.samples), self.size, replace=False, shuffle=False)]

    @property
    def sizes(self) -> np.ndarray:
        return np.broadcast_to(np.int64(self.size), self.devices)

    def renumber(self, samples: np.ndarray) -> "VirtualPopulation":
        return replace(self, samples=samples[self.samples])


def split_virtual(labels: np.ndarray, devices: int, generator: np.random.Generator, size: int) -> VirtualPopulation:
    """Each device draws its own samples from all, from its seed; devices may share samples."""
    if size > len(labels):
        raise ShoalError(
            "bad-value", f"virtual:{size} wants {size} samples, and there are {len(labels)}.", "Give a smaller number."
        )
    return VirtualPopulation(np.arange(len(labels)), size, devices, int(generator.integers(2**63)))
