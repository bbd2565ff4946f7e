"""Products of low-rank factors that replies bring, measured without forming any: ||B A||, ||mean(B A) - B' A'||."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from shoal.core.model.low_rank import Adapter
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.types import Reply, Round

Factors = tuple[Tensor, Tensor]
"""B and A of one adapter in 64 bits."""
COLUMNS = 512
"""How many columns of stacked factors a Gram matrix takes at a time, which bounds its memory."""


def read_factors(params: Params, adapter: Adapter, net: Net) -> Factors:
    """The factors of an adapter in a model; frozen ones are the net's."""
    tensors = ((params if name in params else net.frozen)[name] for name in (adapter.b, adapter.a))
    b, a = (tensor.double() for tensor in tensors)
    return b, a


def read_reply_model(reply: Reply, adapters: Collection[Adapter], round: Round) -> Params:
    """The factors that a device trained, at full shape and by name; 0 in the ranks that its plan left out."""
    anchor, slicer, model = reply.anchor or round.anchor, round.net.slicer, {}
    for name in (name for adapter in adapters for name in (adapter.a, adapter.b)):
        if name in anchor:
            value = anchor[name] + reply.delta[name] if name in reply.delta else anchor[name]
            mask = slicer.covered_mask(name, value, reply.plan)
            model[name] = value if mask is None else torch.where(mask, value, 0.0)
    return model


def compute_squared_norm(left: Tensor, right: Tensor) -> Tensor:
    """||left right||^2 = sum of (left^T left) * (right right^T)."""
    pieces = zip(left.split(COLUMNS, 1), right.split(COLUMNS, 0))
    return torch.stack([((own.T @ left) * (rows @ right.T)).sum() for own, rows in pieces]).sum()


def compute_product_norm(model: Params, adapters: Collection[Adapter], net: Net) -> float:
    """||scale B A|| over all adapters together, the Frobenius norm of what a device added to the weights."""
    squares = [
        adapter.scale**2 * compute_squared_norm(*read_factors(model, adapter, net)).item() for adapter in adapters
    ]
    return sum(squares) ** 0.5


def compute_residue(
    models: Sequence[Params], weights: Sequence[float], combined: Params, adapters: Collection[Adapter], net: Net
) -> float:
    """||mean(B A) - B' A'|| / ||mean(B A)|| over all adapters: models with their weights, and B', A' made of them."""
    gap = norm = 0.0
    for adapter in adapters:
        factors = [read_factors(model, adapter, net) for model in models]
        left = torch.cat([weight * b for weight, (b, _) in zip(weights, factors)], 1)
        right = torch.cat([a for _, a in factors])
        norm += adapter.scale**2 * compute_squared_norm(left, right).item()
        b, a = read_factors(combined, adapter, net)
        gap += adapter.scale**2 * compute_squared_norm(torch.cat((left, -b), 1), torch.cat((right, a))).item()
    return (max(gap, 0.0) / norm) ** 0.5 if norm > 0 else 0.0
