"""The soft confusion matrix of a model (mean probabilities by true class), and its divergence from an ideal one."""

import torch
from torch import Tensor

from shoal.core.batch import Batch, Samples
from shoal.core.model.net import Net
from shoal.core.model.tree import Params

CHUNK_SIZE = 512
"""Samples in one forward pass."""


def encode_one_hot(targets: Tensor, classes: int) -> Tensor:
    """Boolean one-hot vectors of targets; unlike `torch.nn.functional.one_hot` this works under `vmap`."""
    return targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)


def sum_by_class(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Summed probabilities, true class x predicted class, and the number of samples of each class, both weighted."""
    p, classes = logits.detach().softmax(-1), logits.shape[-1]
    sums, counts = p.new_zeros(classes, classes), p.new_zeros(classes)
    for targets, weight in batch.targets:
        members = encode_one_hot(targets, classes).to(p.dtype)
        for factor in (weight, batch.weight):
            members = members if factor is None else members * factor.to(p.dtype).unsqueeze(-1)
        sums, counts = sums + members.T @ p, counts + members.sum(0)
    return sums, counts


def average_class_rows(sums: Tensor, counts: Tensor, fallback: Tensor) -> Tensor:
    """Mean probabilities by true class; the row of `fallback` where a class has no samples."""
    has_samples = (counts > 0).unsqueeze(-1)
    return torch.where(has_samples, sums / counts.clamp(min=1e-12).unsqueeze(-1), fallback)


@torch.no_grad()
def compute_class_matrix(net: Net, params: Params, samples: Samples) -> tuple[Tensor, Tensor]:
    """P_ij = the mean probability of class j over samples of class i, and the number of samples of each class."""
    sums = torch.zeros(net.classes, net.classes, dtype=net.dtype, device=net.place)
    counts = sums.new_zeros(net.classes)
    for rows in samples.index.split(CHUNK_SIZE):
        batch = samples.take_batch(rows)
        more = sum_by_class(net.forward(params, batch.inputs)[0], batch)
        sums, counts = sums + more[0], counts + more[1]
    return average_class_rows(sums, counts, torch.full_like(sums, 1 / net.classes)), counts


def measure_class_divergence(matrix: Tensor, counts: Tensor, tau: float, reduce: str = "mean") -> Tensor:
    """KL(P || Q), mean or sum over the rows of classes that have samples.

    Q has tau on its diagonal and (1 - tau) / (classes - 1) elsewhere: nearly the identity, with all errors alike.
    """
    classes = len(matrix)
    target = torch.full_like(matrix, (1 - tau) / max(classes - 1, 1)).fill_diagonal_(tau)
    rows = (torch.xlogy(matrix, matrix) - matrix * target.log()).sum(1)[counts > 0]
    return rows.sum() if reduce == "sum" else rows.mean()
