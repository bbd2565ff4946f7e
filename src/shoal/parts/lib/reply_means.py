"""Weighted means over the replies, each coordinate over those that hold it, and how they change with one weight."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.aggregate import average_tensor_delta
from shoal.core.model.tree import Params
from shoal.core.types import Round


def average_trees(trees: Sequence[Mapping[str, Tensor]], round: Round) -> Params:
    """The weighted mean of trees shaped like the model, one per reply, each coordinate over those that hold it."""
    replies = [replace(r, delta=dict(own)) for r, own in zip(round.replies, trees, strict=True)]
    weights = round.weights.tolist()
    return {k: average_tensor_delta(k, round.anchor[k], replies, weights) for k in round.net.shared_trainable}


def compute_mean_delta(round: Round) -> Params:
    """The weighted mean of the replies' deltas."""
    return average_trees([r.delta for r in round.replies], round)


def compute_weight_derivatives(round: Round) -> list[Params]:
    """For each reply k: d w / d log a_k = a_k / A * (w_k - w) where it holds a coordinate, A the sum over holders."""
    weights, ways = round.weights.tolist(), [dict[str, Tensor]() for _ in round.replies]
    for name, change in compute_mean_delta(round).items():
        masks = [expand_held_mask(r.covered.get(name), name in r.delta, change) for r in round.replies]
        mass = sum((m * w for m, w in zip(masks, weights)), torch.zeros_like(change))
        for way, reply, mask, weight in zip(ways, round.replies, masks, weights):
            if name in reply.delta:
                share = torch.where(mass > 0, weight * mask / mass, torch.zeros_like(mass))
                way[name] = share * (reply.delta[name] - change)
    return ways


def expand_held_mask(mask: Tensor | None, there: bool, like: Tensor) -> Tensor:
    """1 where a reply holds a coordinate and 0 elsewhere, in the shape of `like`."""
    if mask is None:
        return torch.full_like(like, float(there))
    return mask.to(like.dtype)


def project_gradient(ways: Sequence[Mapping[str, Tensor]], gradient: Mapping[str, Tensor]) -> Tensor:
    """<g, way> for each way: how fast the loss changes along it."""
    products = [
        torch.stack([(g * way[k]).sum(dtype=torch.float64) for k, g in gradient.items() if k in way]) for way in ways
    ]
    return torch.stack([f.sum() for f in products]).cpu()


def cap_weights(weights: Tensor, cap: float) -> Tensor:
    """The weights as shares of which none is above `cap`; what the largest lose goes to the others in proportion.

    With fewer replies than 1 / cap no share can be below an equal one, which then is the bound.
    """
    if cap >= 1 or not weights.sum() > 0:
        return weights
    shares = weights / weights.sum()
    bound = max(cap, 1 / int((shares > 0).sum()))
    full = torch.zeros_like(shares, dtype=torch.bool)
    while bool((shares[~full] > bound * (1 + 1e-12)).any()):
        full |= shares > bound
        rest = shares[~full].sum()
        left = 1 - bound * int(full.sum())
        shares = torch.where(full, bound, shares / rest * left if rest > 0 else 0.0)
    return shares
