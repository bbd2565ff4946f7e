"""Gradient accumulation: the gradient of a batch as the sum of those of its micro-batches."""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model import tree
from shoal.core.model.tree import Params


def accumulate_gradients(gradient: GradientFunction, micro_batch: int) -> GradientFunction:
    """The same gradient from `micro_batch` samples at a time: less memory, for losses that are means over samples."""

    def compute_accumulated(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
        pieces = split_batch(batch, micro_batch)
        if len(pieces) == 1:
            return gradient(scorer, params, batch)
        total: Params = {}
        scores = []
        for piece, share in zip(pieces, compute_shares(pieces)):
            grads, scored = gradient(scorer, params, piece)
            total = {k: total[k] + share * g if total else share * g for k, g in grads.items()}
            scores.append((share, scored))
        return total, join_scores(scores)

    return compute_accumulated


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """Batches of `size` samples that make up a batch; the last may have fewer."""
    length = len(batch.targets[0][0])
    cuts = [slice(first, first + size) for first in range(0, length, size)]
    return [tree.map_tensors(lambda t, rows=rows: t[rows], batch) for rows in cuts]


def compute_shares(pieces: list[Batch]) -> list[float | Tensor]:
    """The part of all samples that each micro-batch has; padding is no sample."""
    if pieces[0].weight is None:
        counts = [len(piece.targets[0][0]) for piece in pieces]
        return [count / sum(counts) for count in counts]
    sums = [piece.weight.sum() for piece in pieces if piece.weight is not None]
    return list((torch.stack(sums) / torch.stack(sums).sum().clamp(min=1)).unbind())


def join_scores(scores: list[tuple[float | Tensor, BatchScore]]) -> BatchScore:
    """The score of a batch from those of its micro-batches and their shares."""
    last = scores[-1][1]

    def join_rows(pick: Callable[[BatchScore], Tensor]) -> Tensor:
        return torch.cat([pick(scored) for _, scored in scores])

    def mean(pick: Callable[[BatchScore], Tensor]) -> Tensor:
        return torch.stack([share * pick(scored) for share, scored in scores]).sum(0)

    return BatchScore(
        mean(lambda s: s.loss),
        join_rows(lambda s: s.logits),
        join_rows(lambda s: s.features),
        {k: join_rows(lambda s, k=k: s.taps[k]) for k in last.taps},
        last.buffers,
        {k: mean(lambda s, k=k: s.aux[k]) for k in last.aux},
    )
