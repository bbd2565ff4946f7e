"""The deviation of a weight around its mean under a spike-and-slab posterior (Xue et al. 2023, eq. 13)."""

from functools import lru_cache
from math import log, sqrt

import torch

from shoal.core.model.net import Net

WEIGHT_BOUND = 2.0
"""No weight is larger, says the theorem."""


def compute_slab_deviation(net: Net, rate: float, seen: int) -> float:
    """s, from the weights that are kept, the samples seen, and the widths and the number of the layers.

    (2 B D)^(-2 L) makes it about 1e-12 for the nets of the paper: less than a float can tell from 0 beside a weight.
    """
    trained = set(net.trainable)
    return evaluate_slab_deviation(tuple(shape for name, shape, _ in net.shapes if name in trained), rate, seen)


@lru_cache(256)
def evaluate_slab_deviation(shapes: tuple[torch.Size, ...], rate: float, seen: int) -> float:
    matrices = [shape for shape in shapes if len(shape) > 1]
    if not matrices:
        return 0.0
    weights = sum(shape.numel() for shape in shapes) * (1 - rate)
    inputs = float(matrices[0][1:].numel())
    hidden = float(max([shape[0] for shape in matrices[:-1]], default=matrices[-1][0]))
    wide = WEIGHT_BOUND * hidden
    bracket = (inputs + 1 + 1 / (wide - 1)) ** 2 + 1 / (wide**2 - 1) + 2 / (wide - 1) ** 2
    scale = weights / (16 * max(seen, 1) * inputs**2) / log(3 * hidden)
    return sqrt(scale / bracket) * (2 * wide) ** (-len(matrices))
