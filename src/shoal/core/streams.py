"""Random streams: one per (seed, purpose, round, device), so that draws never depend on the order of other draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStreams:
    """All randomness of a run. Every call gives a fresh generator at the start of its own stream."""

    seed: int

    def make_torch_generator(self, purpose: str, round: int = 0, device: int = 0) -> torch.Generator:
        """A CPU generator of torch."""
        return torch.Generator().manual_seed(self.derive_seed(purpose, round, device))

    def make_numpy_generator(self, purpose: str, round: int = 0, device: int = 0) -> np.random.Generator:
        """A Philox generator of NumPy."""
        return np.random.Generator(np.random.Philox(key=self.derive_seed(purpose, round, device)))

    def derive_seed(self, purpose: str, round: int = 0, device: int = 0) -> int:
        """The seed of one stream, a 63-bit number."""
        key = f"{self.seed}/{purpose}/{round}/{device}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


def part_stream_name(part: str, purpose: str = "") -> str:
    """The purpose under which a part draws; the loop itself uses no purpose that starts so."""
    return f"part {part} {purpose}"


@contextmanager
def seed_generator(number: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator inside, for layers that draw by themselves; restore its state afterwards."""
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
    generator_state = generator.get_state()
    generator.manual_seed(number)
    try:
        yield
    finally:
        generator.set_state(generator_state)
