"""Norms over all tensors of a model together, in 64 bits."""

from collections.abc import Mapping

import torch
from torch import Tensor


def compute_norm(params: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all tensors together."""
    norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in params.values()]
    return torch.stack(norms or [torch.zeros((), dtype=torch.float64)]).norm()
