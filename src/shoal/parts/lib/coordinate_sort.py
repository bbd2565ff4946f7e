"""Combining replies coordinate by coordinate in sorted order, as the median and the trimmed mean do."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.core.aggregate import average_tensor_delta
from shoal.core.model.tree import Params
from shoal.core.types import Round


def combine_sorted(round: Round, rule: Callable[[Tensor, Tensor], Tensor]) -> Params:
    """New parameters: each coordinate moves by `rule(deltas, holders)` over the replies that hold it.

    The deltas are in rising order along the first dimension; beyond the number of `holders` they are inf.
    """
    replies = [r for r, w in zip(round.replies, round.weights.tolist(), strict=True) if w > 0]
    new = dict(round.anchor)
    for name in round.net.names_with_role("shared"):
        old = round.anchor[name]
        held = [r for r in replies if name in r.delta]
        if not held:
            continue
        if not old.is_floating_point():
            new[name] = old + average_tensor_delta(name, old, held, [1.0] * len(held))
            continue
        values = torch.stack([r.delta[name] for r in held])
        masks = torch.stack([r.covered.get(name, torch.ones_like(old, dtype=torch.bool)) for r in held])
        ranked = torch.where(masks, values, torch.inf).sort(0).values
        holders = masks.sum(0)
        new[name] = old + torch.where(holders > 0, rule(ranked, holders), 0)
    return new
