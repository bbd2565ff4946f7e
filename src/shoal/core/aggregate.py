"""The default aggregation (FedAvg): each coordinate is the weighted mean over the replies that cover it."""

import torch
from torch import Tensor

from shoal.core.model.tree import Params
from shoal.core.stacked_sums import add_weighted
from shoal.core.types import Reply, Round


def average_replies(round: Round) -> Params:
    """Average the replies: w + sum_i p_i m_i d_i / sum_i p_i m_i with weights p, masks m and deltas d of the replies.

    So each coordinate is a mean over those that hold it (whose plan or codec covers it).

    A coordinate that no reply covers keeps its value; whole numbers (counters of batch norm) take the largest delta.
    """
    weights = round.weights.tolist()
    shared = round.net.names_with_role("shared")
    anchor, weighed = round.anchor, [(r, w) for r, w in zip(round.replies, weights, strict=True) if w > 0]
    complete = [
        k
        for k in shared
        if anchor[k].is_floating_point() and all(k in r.delta and k not in r.covered for r, _ in weighed)
    ]
    sums = [torch.zeros_like(anchor[k]) for k in complete]
    if complete:
        add_weighted(sums, [[r.delta[k] for k in complete] for r, _ in weighed], [w for _, w in weighed])
    changes = dict(zip(complete, sums))
    partial = {k: average_tensor_delta(k, anchor[k], round.replies, weights) for k in shared if k not in changes}
    return anchor | {k: anchor[k] + change for k, change in (changes | partial).items()}


def average_tensor_delta(name: str, like: Tensor, replies, weights: list[float]) -> Tensor:
    """The weighted mean delta of one tensor, each coordinate over the replies that cover it; 0 where none does."""
    holders: list[tuple[Reply, float]] = [
        (r, w) for r, w in zip(replies, weights, strict=True) if name in r.delta and w > 0
    ]
    if not holders:
        return torch.zeros_like(like)
    if not like.is_floating_point():
        return torch.stack([r.delta[name] for r, _ in holders]).max(0).values
    total, weight_sum = torch.zeros_like(like), torch.zeros_like(like)
    for reply, weight in holders:
        mask = reply.covered.get(name)
        total.add_(reply.delta[name] if mask is None else reply.delta[name] * mask, alpha=weight)
        weight_sum.add_(1.0 if mask is None else mask.to(weight_sum.dtype), alpha=weight)
    return torch.where(weight_sum > 0, total / weight_sum, torch.zeros_like(total))
