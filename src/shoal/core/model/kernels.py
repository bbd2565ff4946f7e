"""Kernels of torch that have the gradients that a pass needs, where the fastest ones have not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
