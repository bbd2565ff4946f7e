"""Dropout with given random numbers, and batch norm that ignores padding: overrides of torch's own functions.

Dropout layers draw from torch's global generator, and batch norm counts padded samples. Inside `LayerOverrides` dropout
gets its uniform numbers from the caller, and batch norm weighs samples, so that a device trains to the same numbers
alone, batched with others, and with padding. Calls of functions are overridden, not classes, so any module works.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model.checkpointing import Contexts, entered_overrides
from shoal.core.model.tree import Params

UniformDraw = Callable[[torch.Size], Tensor]
"""Shape -> uniform numbers in [0, 1)."""


class LayerOverrides(TorchFunctionMode):
    """While it is entered, calls in `OVERRIDES` go to its methods; one that returns None leaves the call to torch.

    `uniform` draws the numbers of dropout (None: torch's own dropout); `weight` is 1 for samples and 0 for padding
    (None: torch's own batch norm).
    """

    def __init__(self, uniform: UniformDraw | None, weight: Tensor | None = None):
        super().__init__()
        self.uniform, self.weight = uniform, weight
        self.drawn: list[Tensor] = []
        self.replayed: int | None = None
        """How many of `drawn` this pass has used again; None: draws are not kept."""
        self.record: list[Tensor] | None = None
        """Where the draws of a layer are kept that will be computed again."""

    def __enter__(self):
        self.token = entered_overrides.set(self)
        return super().__enter__()

    def __exit__(self, *error):
        entered_overrides.reset(self.token)
        return super().__exit__(*error)

    def draw_uniform(self, uniform: UniformDraw, shape: torch.Size) -> Tensor:
        """The numbers of the next layer: new ones, or those that it had in the pass before."""
        if self.replayed is None:
            numbers = uniform(shape)
        else:
            if self.replayed == len(self.drawn):
                self.drawn.append(uniform(shape))
            self.replayed += 1
            numbers = self.drawn[self.replayed - 1]
        if self.record is not None:
            self.record.append(numbers)
        return numbers

    def record_draws(self) -> Contexts:
        """What is entered while a layer is computed that will be computed again, and what is entered then."""
        record: list[Tensor] = []

        @contextmanager
        def keep_draws() -> Iterator[None]:
            before, self.record = self.record, record
            try:
                yield
            finally:
                self.record = before

        @contextmanager
        def use_kept_draws() -> Iterator[None]:
            kept = iter(record)
            with LayerOverrides(self.uniform and (lambda shape: next(kept)), self.weight):
                yield

        return keep_draws(), use_kept_draws()

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func in OVERRIDES:
            output = OVERRIDES[func](self, *args, **(kwargs or {}))
            if output is not None:
                return output
        return func(*args, **(kwargs or {}))

    def apply_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        return self._drop_units(input, input.shape, p, training)

    def apply_channel_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        """Dropout of whole channels: one number for each sample and channel."""
        return self._drop_units(input, input.shape[:2] + (1,) * (input.dim() - 2), p, training)

    def _drop_units(self, x: Tensor, shape: torch.Size, p: float, training: bool) -> Tensor | None:
        """0 where u < p, else x / (1 - p), with u drawn in `shape` and broadcast."""
        if self.uniform is None or not training or not 0 < p < 1:
            return None
        return torch.where(self.draw_uniform(self.uniform, shape).to(x.device) < p, 0.0, x / (1 - p))

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
        """Batch norm in training with mean and variance over the samples of weight 1, not over padding."""
        x = input
        if self.weight is None or not training or len(self.weight) != len(x):
            return None
        channel_shape = (1, -1) + (1,) * (x.dim() - 2)
        sample_weights = self.weight.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
        reduced_dims = [d for d in range(x.dim()) if d != 1]
        count = (self.weight.sum() * (x.numel() // (x.shape[0] * x.shape[1]))).to(x.dtype)
        mean = (x * sample_weights).sum(reduced_dims) / count.clamp(min=1)
        var = ((x - mean.view(channel_shape)).square() * sample_weights).sum(reduced_dims) / count.clamp(min=1)
        if running_mean is not None and running_var is not None:
            unbiased = var.detach() * count / (count - 1).clamp(min=1)
            running_mean.copy_((1 - momentum) * running_mean + momentum * mean.detach())
            running_var.copy_((1 - momentum) * running_var + momentum * unbiased)
        output = (x - mean.view(channel_shape)) * (var + eps).rsqrt().view(channel_shape)
        if weight is not None:
            output = output * weight.view(channel_shape)
        return output if bias is None else output + bias.view(channel_shape)


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
    """The overrides that a model needs: `draws` says that it has dropout, `mixes` that it has batch norm.

    A mode slows every call of torch a little, so there is none where it would change nothing.
    """
    if not draws and (not mixes or weight is None):
        return nullcontext()
    return LayerOverrides(uniform if draws else None, weight if mixes else None)


def replay_layer_draws(gradient: GradientFunction) -> GradientFunction:
    """The same gradient, with the same draws of dropout layers at every call within one local step."""

    def compute_with_same_draws(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
        overrides = entered_overrides.get()
        if overrides is not None:
            overrides.replayed = 0
        return gradient(scorer, params, batch)

    return compute_with_same_draws
