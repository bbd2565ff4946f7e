"""Which of torch's kernels a pass may use, where the fastest one cannot do what is asked of it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def use_differentiable_kernels(module: nn.Module, place: torch.device, twice: bool = False) -> Iterator[None]:
    """For a pass of a model that is not in training, and whose gradient is wanted; with `twice`, that one's gradient.

    cuDNN's recurrent layers have a gradient in training only, and no second one. Fused attention has no second one
    either, its mathematical form (two products and a softmax) has.
    """
    with ExitStack() as stack:
        if place.type == "cuda" and any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if twice:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
