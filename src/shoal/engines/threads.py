"""The number of threads that torch computes with.

Sums that are split among threads are added in another order, so the number of threads changes the last digits of
whatever is computed, and belongs to a run like its seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Compute with this number of threads inside, and with the previous number afterwards; 0 changes nothing."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number:
            torch.set_num_threads(before)
