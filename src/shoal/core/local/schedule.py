"""Which samples a device looks at in which step of its local run."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from shoal.core.types import Work


@dataclass(frozen=True, eq=False)
class BatchSchedule:
    """The rows of every batch, in order. In the table a short batch is filled up; `sizes` says what counts."""

    table: Tensor
    """Steps x rows."""
    sizes: list[int]
    per_epoch: int

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, step: int) -> Tensor:
        return self.table[step, : self.sizes[step]]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[step] for step in range(len(self)))

    @property
    def batch_size(self) -> int:
        """The size of a whole batch."""
        return self.table.shape[1]


def make_schedule(index: Tensor, work: Work, generator: torch.Generator, mixes_batch: bool) -> BatchSchedule:
    """Epoch after epoch in a new order; a last batch of one sample is left out where a model mixes its batch."""
    n, batch = len(index), min(work.batch, len(index))
    single = mixes_batch and n > 1 and n % batch == 1
    per_epoch = ceil(n / batch) - (1 if single else 0)
    total = work.steps or max(1, round(work.epochs * per_epoch))
    epochs = [torch.randperm(n, generator=generator) for _ in range(ceil(total / per_epoch))]
    wanted = per_epoch * batch
    filled = [torch.cat((order, order[: wanted - n])) if wanted > n else order[:wanted] for order in epochs]
    sizes = [batch] * (per_epoch - 1) + [min(batch, n - (per_epoch - 1) * batch)]
    return BatchSchedule(index[torch.cat(filled)].view(-1, batch)[:total], (sizes * len(epochs))[:total], per_epoch)
