"""The deviation of a weight around its mean under a spike-and-slab posterior (Xue et al. 2023, eq. 13)."""

from math import log, sqrt

from shoal.core.net import Net
from shoal.core.tree import Params

BOUND = 2.0
"""No weight is larger, says the theorem."""


def deviation(net: Net, params: Params, rate: float, seen: int) -> float:
    """s, from the weights that are kept, the samples seen, and the widths and the number of the layers.

    (2 B D)^(-2 L) makes it about 1e-12 for the nets of the paper: less than a float can tell from 0 beside a weight.
    """
    matrices = [params[k] for k in net.trainable if params[k].dim() > 1]
    if not matrices:
        return 0.0
    weights = sum(params[k].numel() for k in net.trainable) * (1 - rate)
    inputs = float(matrices[0][0].numel())
    hidden = float(max([len(m) for m in matrices[:-1]], default=len(matrices[-1])))
    wide = BOUND * hidden
    bracket = (inputs + 1 + 1 / (wide - 1)) ** 2 + 1 / (wide**2 - 1) + 2 / (wide - 1) ** 2
    scale = weights / (16 * max(seen, 1) * inputs**2) / log(3 * hidden)
    return sqrt(scale / bracket) * (2 * wide) ** (-len(matrices))
