"""Tensors with one element for each device of the population."""

from collections.abc import Sequence

import torch
from torch import Tensor


def put_at_devices(values: Tensor, devices: Sequence[int], new: Sequence[float | bool]) -> Tensor:
    """The same tensor with new elements for some devices."""
    at = torch.tensor(list(devices), dtype=torch.long, device=values.device)
    return values.index_copy(0, at, torch.tensor(list(new), dtype=values.dtype, device=values.device))
