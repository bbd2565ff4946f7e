"""The default way to combine replies: every coordinate's weighted mean over the replies that cover it."""

import torch
from torch import Tensor

from shoal.core.tree import Params
from shoal.core.types import Reply, Round


def holders_mean(round: Round) -> Params:
    """The new parameters; a coordinate that nobody covers keeps its value, counters take the largest."""
    weights = round.weights.tolist()
    shared = round.net.named("shared")
    return round.anchor | {k: round.anchor[k] + mean_delta(k, round.anchor[k], round.replies, weights) for k in shared}


def mean_delta(name: str, like: Tensor, replies, weights: list[float]) -> Tensor:
    """The weighted mean change of one tensor over those who cover it."""
    held: list[tuple[Reply, float]] = [
        (r, w) for r, w in zip(replies, weights, strict=True) if name in r.delta and w > 0
    ]
    if not held:
        return torch.zeros_like(like)
    if not like.is_floating_point():
        return torch.stack([r.delta[name] for r, _ in held]).max(0).values
    if len(held) == len([w for w in weights if w > 0]) and all(name not in r.covered for r, _ in held):
        total = torch.zeros_like(like)
        for reply, weight in held:
            total.add_(reply.delta[name], alpha=weight)
        return total
    total, mass = torch.zeros_like(like), torch.zeros_like(like)
    for reply, weight in held:
        mask = reply.covered.get(name)
        total.add_(reply.delta[name] if mask is None else reply.delta[name] * mask, alpha=weight)
        mass.add_(1.0 if mask is None else mask.to(mass.dtype), alpha=weight)
    return torch.where(mass > 0, total / mass, torch.zeros_like(total))
