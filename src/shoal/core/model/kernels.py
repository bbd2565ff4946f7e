"""Kernels of torch that can be differentiated or vectorised as a pass needs it, where the fastest ones cannot."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def use_differentiable_kernels(module: nn.Module, place: torch.device, twice: bool = False) -> Iterator[None]:
    """Inside, a model in evaluation mode can be differentiated; with `twice`, two times.

    cuDNN's recurrent layers have a gradient in training only, and no second one. Fused attention has no second one
    either, its mathematical form (two products and a softmax) has.
    """
    with ExitStack() as stack:
        if place.type == "cuda" and any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if twice:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def use_vectorisable_attention(place: torch.device) -> AbstractContextManager[Any]:
    """Inside, attention can be made for many devices in one call; on a CPU its fused kernel would take them in turn."""
    return sdpa_kernel(SDPBackend.MATH) if place.type == "cpu" else nullcontext()
