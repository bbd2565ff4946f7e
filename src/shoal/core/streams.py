"""Random streams: one per (seed, purpose, round, device), so that draws never depend on the order of other draws."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch

TWISTERS = threading.local()
"""One generator of 32-bit words for each thread, seeded anew for every stream."""


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

    def draw_words(self, count: int, purpose: str, round: int = 0, device: int = 0) -> np.ndarray:
        """The first 32-bit words of the stream that `make_torch_generator` draws from, many at once.

        Both are the Mersenne Twister of 1997, of which torch takes the lower half of a seed; `core/words.py` makes of
        words the numbers that torch makes of them.
        """
        if not hasattr(TWISTERS, "state"):
            TWISTERS.state = np.random.RandomState(0)  # to make one takes a hundred times as long as to seed it
        TWISTERS.state.seed(self.derive_seed(purpose, round, device) & 0xFFFFFFFF)
        return TWISTERS.state.randint(0, 1 << 32, count, np.uint32)

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
