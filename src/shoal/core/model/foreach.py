"""One operation on each tensor of a list: in few kernels by torch._foreach_*, or one by one where torch lacks those."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.model.torch_fallback import log_fallback


def subtract_each(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """a - b for each pair."""
    return call_foreach("sub", lambda: [one - other for one, other in zip(a, b)], list(a), list(b))


def add_to_each(sums: Sequence[Tensor], tensors: Sequence[Tensor], factor: float) -> None:
    """Add factor * tensor to each sum, in place."""
    call_foreach(
        "add_", lambda: [s.add_(t, alpha=factor) for s, t in zip(sums, tensors)], sums, list(tensors), alpha=factor
    )


def copy_into_each(buffers: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each tensor into its buffer."""
    if buffers:
        call_foreach("copy_", lambda: [b.copy_(t) for b, t in zip(buffers, tensors)], list(buffers), list(tensors))


def compute_max_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor; not a finite number where the tensor has one that is not."""
    infinity = float("inf")
    return list(
        call_foreach("norm", lambda: [torch.linalg.vector_norm(t, infinity) for t in tensors], list(tensors), infinity)
    )


def call_foreach(operation: str, call_one_by_one: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """torch._foreach_{operation}, or the other way where it is missing or takes other arguments."""
    try:
        return getattr(torch, f"_foreach_{operation}")(*args, **kwargs)
    except (AttributeError, TypeError):
        log_fallback(f"_foreach_{operation}", "tensors are handled one by one")
        return call_one_by_one()
