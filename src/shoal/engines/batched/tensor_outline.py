"""Tensors without numbers that say of themselves what the real ones would: shape, strides, type and device.

Torch's own, fake tensors, take half a second to import.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class TensorOutline(Tensor):
    """A tensor without numbers; what is made of it has none either."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outlines: list[TensorOutline] = []

        def remove_device(outline: TensorOutline) -> Tensor:
            outlines.append(outline)
            return torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype, device="meta")

        args, kwargs = tree_map_only(TensorOutline, remove_device, (args, kwargs or {}))
        place = outlines[0].device
        return tree_map_only(Tensor, lambda t: make_outline(t.shape, t.stride(), t.dtype, place), func(*args, **kwargs))


def make_outline(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this form without numbers."""
    torch.empty_strided(shape, stride, dtype=dtype, device="meta")  # refuses what is no form
    return Tensor._make_wrapper_subclass(TensorOutline, shape, strides=stride, dtype=dtype, device=device)
