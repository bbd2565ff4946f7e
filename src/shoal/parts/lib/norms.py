"""The length of a tree of tensors, for what parts tell."""

import torch
from torch import Tensor

from shoal.core.model.tree import Params


def compute_norm(params: Params) -> Tensor:
    """The 2-norm of all tensors together."""
    return torch.stack([torch.linalg.vector_norm(v, dtype=torch.float64) for v in params.values()]).norm()
