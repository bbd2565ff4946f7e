"""Random numbers from 32-bit words, as torch makes them on a processor: for draws of many steps at once."""

import torch
from torch import Tensor

WHOLE_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def read_uniform(words: Tensor) -> Tensor:
    """The numbers in [0, 1) of `torch.rand`: the lower 24 bits of each word."""
    return (words & 0xFFFFFF).float() * 2.0**-24


def read_symmetric(words: Tensor) -> Tensor:
    """Numbers from -1 to 1."""
    return 2 * read_uniform(words) - 1


def read_integers(words: Tensor, count: int) -> Tensor:
    """The numbers of `torch.randint(count, ...)`, for a count below 2 ** 28, in the smallest type that holds them."""
    smallest = next(dtype for dtype in WHOLE_TYPES if count - 1 <= torch.iinfo(dtype).max)
    return (words % count).to(smallest)
