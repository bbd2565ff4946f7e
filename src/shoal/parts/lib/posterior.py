"""The deviation of a weight around its mean under a spike-and-slab posterior (FedBIAD, Xue et al. 2023, eq. (13))."""

from functools import lru_cache
from math import log, sqrt

import torch

from shoal.core.model.net import Net

WEIGHT_BOUND = 2.0
"""B, the bound on weights; Assumption 2 asks for 2 at least."""


def compute_slab_deviation(net: Net, rate: float, seen: int) -> float:
    """s~ of eq. (13), from the shapes of the net, the dropout rate p and m, the amount of data seen.

    s~^2 = S / (16 m d^2) / log(3 D) * (2 B D)^(-2 L) / ((d + 1 + 1 / (BD - 1))^2 + 1 / ((BD)^2 - 1) + 2 / (BD - 1)^2)

    S are the weights that are kept, d the width of the input, D the largest hidden one, L the number of layers. The
    power of 2 B D makes s~ about 1e-12 for the nets of the paper: less than a float can tell from 0 beside a weight.
    """
    trained = set(net.trainable)
    return evaluate_slab_deviation(tuple(shape for name, shape, _ in net.shapes if name in trained), rate, seen)


@lru_cache(256)
def evaluate_slab_deviation(shapes: tuple[torch.Size, ...], rate: float, seen: int) -> float:
    """s~ from the shapes of all trained tensors; those of two or more dimensions are the layers."""
    matrices = [shape for shape in shapes if len(shape) > 1]
    if not matrices:
        return 0.0
    weights = sum(shape.numel() for shape in shapes) * (1 - rate)
    inputs = float(matrices[0][1:].numel())
    hidden = float(max([shape[0] for shape in matrices[:-1]], default=matrices[-1][0]))
    bd = WEIGHT_BOUND * hidden
    bracket = (inputs + 1 + 1 / (bd - 1)) ** 2 + 1 / (bd**2 - 1) + 2 / (bd - 1) ** 2
    scale = weights / (16 * max(seen, 1) * inputs**2) / log(3 * hidden)
    return sqrt(scale / bracket) * (2 * bd) ** (-len(matrices))
