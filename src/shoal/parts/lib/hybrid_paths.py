"""Hybrid paths: the first blocks of a local model go on through the last blocks of the received one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.local.step import compute_mean_loss
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.types import Batch, BatchScore, Local, Scorer


def find_block_ends(net: Net) -> tuple[str, ...]:
    """The layers after which a path may change over: the last one of every block but the last."""
    return tuple(block.children[-1] for block in net.blocks[:-1])


def require_blocks(part: Part, net: Net) -> None:
    if len(net.blocks) < 2:
        problem = f"{part.name()} works on blocks of a model, and this one has fewer than two."
        raise ShoalError("bad-part", problem, "Use a model of the list (shoal list models), or an nn.Sequential.")


def add_hybrid_paths(
    inner: Scorer,
    local: Local,
    ways: Sequence[int],
    cross: float | Tensor,
    distil: float | Tensor,
    heat: float | Tensor,
) -> Scorer:
    """The inner loss, the cross-entropy of the hybrid paths, and how far their predictions are from the local one's.

    A path in `ways` has so many of the received model's blocks, its last ones. Those do not move, but gradients go
    through them into the local blocks before them.
    """
    ends, blocks = find_block_ends(local.net), len(local.net.blocks)

    def score_hybrid_paths(params: Params, batch: Batch) -> BatchScore:
        scored = inner(params, batch)
        own = (scored.logits / heat).log_softmax(-1)
        total = torch.zeros_like(scored.loss)
        for way in ways:
            first = blocks - way
            logits = local.net.forward_from_block(local.anchor, scored.taps[ends[first - 1]], first, training=True)
            theirs = (logits / heat).log_softmax(-1)
            apart = (theirs.exp() * (theirs - own)).sum(-1)
            apart = apart if apart.dim() == 1 else apart.flatten(1).mean(1)
            total = total + cross * compute_mean_loss(logits, batch) + distil * batch.mean(apart)
        return scored._replace(loss=scored.loss + total / max(len(ways), 1))

    return score_hybrid_paths
