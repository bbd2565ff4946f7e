"""Hybrid paths: the first blocks of the local model continued by the last blocks of the received one.

Shared by FedMLB (Kim et al. 2022) and FedBR (Liu et al. 2023, eq. (15)-(18), whose symbols are used here).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.types import Local


def find_block_ends(net: Net) -> tuple[str, ...]:
    """The layers after which a path can change over to the received model: the last of every block but the last one."""
    return tuple(block.children[-1] for block in net.blocks[:-1])


def require_blocks(part: Part, net: Net) -> None:
    """Refuses a model of fewer than two blocks, which has no place for a path to change over."""
    if len(net.blocks) < 2:
        problem = f"{part.name()} works on blocks of a model, and this one has fewer than two."
        raise ShoalError("bad-part", problem, "Use a model of the list (shoal list models), or an nn.Sequential.")


def add_hybrid_paths(
    inner: Scorer,
    local: Local,
    paths: Sequence[int],
    cross: float | Tensor,
    distil: float | Tensor,
    heat: float | Tensor,
    shares: Tensor | None = None,
) -> Scorer:
    """zeta = inner loss + cross zeta_H + distil zeta_KL, eq. (18), with means over the hybrid paths j in `paths`:

        zeta_H  = mean_j CE(q_H^j, y)                                        eq. (16)
        zeta_KL = mean_j KL(softmax(q_H^j / heat) || softmax(q_L / heat))    eq. (17)

    Path j ends with the last j blocks of the received model. Those do not move, but gradients go through them into the
    local blocks before them.

    With `shares` the means are sums over the paths j, weighed by shares[j - 1]. A share of 0 takes a path out: what it
    would compute from its block's input is computed from zeros, so that numbers of it that are not finite do no harm.
    """
    ends, blocks = find_block_ends(local.net), len(local.net.blocks)

    def score_hybrid_paths(params: Params, batch: Batch) -> BatchScore:
        scored = inner(params, batch)
        q_local = (scored.logits / heat).log_softmax(-1)
        total = torch.zeros_like(scored.loss)
        for j in paths:
            first = blocks - j
            x = scored.taps[ends[first - 1]]
            x = x if shares is None else torch.where(shares[j - 1] > 0, x, 0)
            logits = local.net.forward_from_block(local.anchor, x, first, training=True)
            q_hybrid = (logits / heat).log_softmax(-1)
            divergence = (q_hybrid.exp() * (q_hybrid - q_local)).sum(-1)
            divergence = divergence if divergence.dim() == 1 else divergence.flatten(1).mean(1)
            loss = local.net.task.compute_mean_loss(logits, batch)
            if shares is None:
                total = total + cross * loss + distil * batch.mean(divergence)
            else:
                total = total + shares[j - 1] * (cross * loss + distil * batch.mean(divergence))
        return scored._replace(loss=scored.loss + (total / max(len(paths), 1) if shares is None else total))

    return score_hybrid_paths
