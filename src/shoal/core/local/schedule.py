"""The batches of a device's local training: which samples it trains on in which step."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from shoal.core.phases import in_phase
from shoal.core.types import Work


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """The sample indices of every batch, step by step; only the first `sizes[step]` of a row of `table` count."""

    table: Tensor
    """Steps x batch size; a short batch is filled up with other samples."""
    sizes: list[int]
    per_epoch: int
    """Steps in one epoch."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, step: int) -> Tensor:
        return self.table[step, : self.sizes[step]]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[step] for step in range(len(self)))

    @property
    def batch_size(self) -> int:
        """Samples in a batch that is not short."""
        return self.table.shape[1]


@in_phase("data")
def make_schedule(index: Tensor, work: Work, generator: torch.Generator, mixes_batch: bool) -> BatchSchedule:
    """Batches of `work.steps` steps, or of `work.epochs` epochs, each epoch in a newly drawn order.

    Where the model has batch norm (`mixes_batch`), a last batch of a single sample is left out: it has no variance.
    """
    n = index.numel()
    batch = min(work.batch, n)
    drops_last = mixes_batch and n > 1 and n % batch == 1
    per_epoch = ceil(n / batch) - (1 if drops_last else 0)
    total = work.steps or max(1, round(work.epochs * per_epoch))
    count, length = ceil(total / per_epoch), per_epoch * batch
    epochs = [torch.randperm(n, generator=generator) for _ in range(count)]
    if length > n:
        epochs = [torch.cat((order, order[: length - n])) for order in epochs]
    elif length < n:
        epochs = [order[:length] for order in epochs]
    order = epochs[0] if count == 1 else torch.cat(epochs)
    sizes = [batch] * (per_epoch - 1) + [min(batch, n - (per_epoch - 1) * batch)]
    table = index.index_select(0, order).view(-1, batch)
    if count * per_epoch == total:
        return BatchSchedule(table, sizes * count, per_epoch)
    return BatchSchedule(table[:total], (sizes * count)[:total], per_epoch)
