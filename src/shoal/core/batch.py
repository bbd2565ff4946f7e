"""A mini-batch, what the model makes of it, and the samples of a device from which batches are taken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from shoal.core.model.inputs import Inputs, scale_pixels, take_rows
from shoal.core.model.tree import Params
from shoal.core.phases import in_phase
from shoal.core.short_repr import make_short_repr


class Batch(NamedTuple):
    """One mini-batch. `weight` is 0 for padding (None: no padding).

    `inputs` are one tensor, or a dict or tuple of tensors. `targets` are pairs of targets and a weight per sample
    (None: 1); there is one pair unless a part like Mixup adds others.
    """

    inputs: Inputs
    targets: tuple[tuple[Tensor, Tensor | None], ...]
    weight: Tensor | None = None

    def __repr__(self) -> str:
        return make_short_repr(self)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over samples of one value each, without padding."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum().clamp(min=1)


class BatchScore(NamedTuple):
    """Loss and outputs of the model for one mini-batch.

    `features` are the inputs of the last layer, `taps` the outputs of layers that parts asked for by name, `buffers`
    the buffers after the pass (statistics of batch norm), `aux` what parts pass to
    their `step`.
    """

    loss: Tensor
    logits: Tensor
    features: Tensor
    taps: dict[str, Tensor]
    buffers: dict[str, Tensor]
    aux: dict[str, Tensor]

    def __repr__(self) -> str:
        return make_short_repr(self)


class Scorer(Protocol):
    """The local objective: loss and outputs of a batch at given parameters."""

    def __call__(self, params: Params, batch: Batch, /) -> BatchScore: ...


GradientFunction: TypeAlias = Callable[[Scorer, Params, Batch], tuple[Params, BatchScore]]
"""(scorer, parameters, batch) -> the gradient of the loss, and the score."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples of a data set, by their row numbers `index` (on the CPU); a batch is copied when it is taken."""

    inputs: Inputs
    targets: Tensor
    index: Tensor

    def __repr__(self) -> str:
        return make_short_repr(self)

    def __len__(self) -> int:
        return self.index.numel()

    @in_phase("data")
    def take_batch(self, rows: Tensor) -> Batch:
        """The rows of the data set with these numbers."""
        rows = rows.to(self.targets.device)
        return Batch(scale_pixels(take_rows(self.inputs, rows)), ((self.targets.index_select(0, rows), None),))

    def take_all(self) -> Batch:
        """All samples as one batch."""
        return self.take_batch(self.index)

    def join(self, other: "Samples") -> "Samples":
        """These samples and then the others, which must be of the same data set."""
        return Samples(self.inputs, self.targets, torch.cat((self.index, other.index)))
