"""Partners within a batch: another sample for each, from which a part takes something, and whose label then counts."""

import torch
from torch import Tensor

from shoal.core.batch import Batch


def find_partners(batch: Batch, shift: Tensor) -> Tensor:
    """For each sample the number of its partner, a share `shift` of the batch further on, round the end.

    Padding is behind the samples and is nobody's partner.
    """
    x = batch.inputs
    assert isinstance(x, Tensor)
    here = torch.arange(len(x), device=x.device)
    count = torch.full_like(here[0], len(x)) if batch.weight is None else (batch.weight > 0).sum()
    # a batch of padding alone has no samples to go round
    return (here + (shift * count).long()).remainder(count.clamp(min=1))


def add_partner_targets(batch: Batch, partner: Tensor, own: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """The targets of the samples, which count `own`, and those of their partners, which count the rest."""
    x = batch.inputs
    assert isinstance(x, Tensor)
    first, second = [], []
    for targets, weight in batch.targets:
        weight = torch.ones(len(x), dtype=x.dtype, device=x.device) if weight is None else weight
        first.append((targets, own * weight))
        second.append((targets.index_select(0, partner), (1 - own) * weight.index_select(0, partner)))
    return (*first, *second)
