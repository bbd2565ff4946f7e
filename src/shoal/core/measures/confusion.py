"""What a model takes the samples of each class for: a matrix of probabilities, and how far it is from an even one."""

import torch
from torch import Tensor

from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.types import Batch, Samples

CHUNK_SIZE = 512


def encode_one_hot(targets: Tensor, classes: int) -> Tensor:
    """For each target, which class it is; torch's own form of it is not for many devices at once."""
    return targets.unsqueeze(-1) == torch.arange(classes, device=targets.device)


def sum_by_class(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The summed probabilities of each class's samples, and how many those are; by weight where targets have one."""
    p, classes = logits.detach().softmax(-1), logits.shape[-1]
    sums, counts = p.new_zeros(classes, classes), p.new_zeros(classes)
    for targets, weight in batch.targets:
        there = encode_one_hot(targets, classes).to(p.dtype)
        for factor in (weight, batch.weight):
            there = there if factor is None else there * factor.to(p.dtype).unsqueeze(-1)
        sums, counts = sums + there.T @ p, counts + there.sum(0)
    return sums, counts


def average_class_rows(sums: Tensor, counts: Tensor, otherwise: Tensor) -> Tensor:
    """The mean probabilities of each class's samples; another matrix's row where a class has none."""
    there = (counts > 0).unsqueeze(-1)
    return torch.where(there, sums / counts.clamp(min=1e-12).unsqueeze(-1), otherwise)


@torch.no_grad()
def compute_class_matrix(net: Net, params: Params, samples: Samples) -> tuple[Tensor, Tensor]:
    """P_ij = the mean probability of class j over samples of class i, and how many samples each class has."""
    sums = torch.zeros(net.classes, net.classes, dtype=net.dtype, device=net.place)
    counts = sums.new_zeros(net.classes)
    for rows in samples.index.split(CHUNK_SIZE):
        batch = samples.take_batch(rows)
        more = sum_by_class(net.forward(params, batch.inputs)[0], batch)
        sums, counts = sums + more[0], counts + more[1]
    return average_class_rows(sums, counts, torch.full_like(sums, 1 / net.classes)), counts


def measure_class_divergence(matrix: Tensor, counts: Tensor, tau: float, reduce: str = "mean") -> Tensor:
    """KL(P || Q), Q nearly the identity with all errors alike, over the rows of classes that there are."""
    classes = len(matrix)
    even = torch.full_like(matrix, (1 - tau) / max(classes - 1, 1)).fill_diagonal_(tau)
    rows = (torch.xlogy(matrix, matrix) - matrix * even.log()).sum(1)[counts > 0]
    return rows.sum() if reduce == "sum" else rows.mean()
