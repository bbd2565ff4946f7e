"""The default way to combine replies: every coordinate's weighted mean over the replies that cover it."""

import torch
from torch import Tensor

from shoal.core.model.tree import Params
from shoal.core.types import Reply, Round


def aggregate_holders(round: Round) -> Params:
    """The new parameters; a coordinate that nobody covers keeps its value, counters take the largest."""
    weights = round.weights.tolist()
    shared = round.net.names_with_role("shared")
    anchor, counted = round.anchor, [(r, w) for r, w in zip(round.replies, weights, strict=True) if w > 0]
    whole = [
        k
        for k in shared
        if anchor[k].is_floating_point() and all(k in r.delta and k not in r.covered for r, _ in counted)
    ]
    total = [torch.zeros_like(anchor[k]) for k in whole]
    for reply, weight in counted if whole else ():
        torch._foreach_add_(total, [reply.delta[k] for k in whole], alpha=weight)  # pyright: ignore[reportPrivateImportUsage]
    changes = dict(zip(whole, total))
    rest = {k: average_delta(k, anchor[k], round.replies, weights) for k in shared if k not in changes}
    return anchor | {k: anchor[k] + change for k, change in (changes | rest).items()}


def average_delta(name: str, like: Tensor, replies, weights: list[float]) -> Tensor:
    """The weighted mean change of one tensor over those who cover it."""
    held: list[tuple[Reply, float]] = [
        (r, w) for r, w in zip(replies, weights, strict=True) if name in r.delta and w > 0
    ]
    if not held:
        return torch.zeros_like(like)
    if not like.is_floating_point():
        return torch.stack([r.delta[name] for r, _ in held]).max(0).values
    total, mass = torch.zeros_like(like), torch.zeros_like(like)
    for reply, weight in held:
        mask = reply.covered.get(name)
        total.add_(reply.delta[name] if mask is None else reply.delta[name] * mask, alpha=weight)
        mass.add_(1.0 if mask is None else mask.to(mass.dtype), alpha=weight)
    return torch.where(mass > 0, total / mass, torch.zeros_like(total))
