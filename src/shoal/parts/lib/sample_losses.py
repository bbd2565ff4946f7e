"""The loss of a model on samples of a device, in evaluation mode."""

import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.model.net import Net
from shoal.core.model.tree import Params

SAMPLES_IN_A_PASS = 500
"""Samples in one forward pass."""


@torch.no_grad()
def compute_loss_on_samples(net: Net, params: Params, samples: Samples) -> Tensor:
    """The mean loss of the task over all of them."""
    total = torch.zeros((), dtype=torch.float64, device=net.place)
    for rows in samples.index.split(SAMPLES_IN_A_PASS):
        batch = samples.take_batch(rows)
        logits = net.forward(params, batch.inputs)[0]
        total = total + net.task.compute_sample_losses(logits, batch.targets[0][0]).sum(dtype=torch.float64)
    return total / max(len(samples), 1)
