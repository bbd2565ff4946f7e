"""What layers do by themselves in training, brought under control: the masks of dropout, the statistics of batch norm.

Dropout layers draw from torch's global generator, and batch norm counts padding as samples. Inside `Chance` the first
get their uniform numbers from outside, and the second looks at the weights of the samples; so a device trains to the
same numbers alone, beside others, and with padding. It works on calls and not on classes, for any module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

UniformDraw = Callable[[torch.Size], Tensor]


class LayerOverrides(TorchFunctionMode):
    """Answers the calls of layers while it is entered."""

    def __init__(self, uniform: UniformDraw | None, weight: Tensor | None = None):
        super().__init__()
        self.uniform, self.weight = uniform, weight

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func in OVERRIDES:
            answer = OVERRIDES[func](self, *args, **(kwargs or {}))
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))

    def apply_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        return self._drop_units(input, input.shape, p, training)

    def apply_channel_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        """Whole channels of a sample at once."""
        return self._drop_units(input, input.shape[:2] + (1,) * (input.dim() - 2), p, training)

    def _drop_units(self, x: Tensor, shape: torch.Size, p: float, training: bool) -> Tensor | None:
        if self.uniform is None or not training or not 0 < p < 1:
            return None
        return torch.where(self.uniform(shape).to(x.device) < p, 0.0, x / (1 - p))

    def apply_batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        """Mean and variance over the samples that count."""
        x = input
        if self.weight is None or not training or len(self.weight) != len(x):
            return None
        column = (1, -1) + (1,) * (x.dim() - 2)
        counts = self.weight.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        others = [d for d in range(x.dim()) if d != 1]
        count = (self.weight.sum() * (x.numel() // (x.shape[0] * x.shape[1]))).to(x.dtype)
        mean = (x * counts).sum(others) / count.clamp(min=1)
        var = ((x - mean.view(column)).square() * counts).sum(others) / count.clamp(min=1)
        if running_mean is not None and running_var is not None:
            unbiased = var.detach() * count / (count - 1).clamp(min=1)
            running_mean.copy_((1 - momentum) * running_mean + momentum * mean.detach())
            running_var.copy_((1 - momentum) * running_var + momentum * unbiased)
        made = (x - mean.view(column)) * (var + eps).rsqrt().view(column)
        if weight is not None:
            made = made * weight.view(column)
        return made if bias is None else made + bias.view(column)


OVERRIDES = {
    F.dropout: LayerOverrides.apply_dropout,
    torch.dropout: LayerOverrides.apply_dropout,
    torch.feature_dropout: LayerOverrides.apply_channel_dropout,
    F.dropout1d: LayerOverrides.apply_channel_dropout,
    F.dropout2d: LayerOverrides.apply_channel_dropout,
    F.dropout3d: LayerOverrides.apply_channel_dropout,
    F.batch_norm: LayerOverrides.apply_batch_norm,
}


def override_layers(
    draws: bool, mixes: bool, uniform: UniformDraw | None, weight: Tensor | None
) -> AbstractContextManager[Any]:
    """A `Chance` where the layers of a model need one; it slows every call a little, so nothing where they do not."""
    if not draws and (not mixes or weight is None):
        return nullcontext()
    return LayerOverrides(uniform if draws else None, weight if mixes else None)
