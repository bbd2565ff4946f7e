"""The gradient of the mean loss on given samples, with the model in evaluation mode."""

import torch

from shoal.core.batch import Samples
from shoal.core.model import tree
from shoal.core.model.kernels import use_differentiable_kernels
from shoal.core.model.net import Net
from shoal.core.model.tree import Params

SAMPLES_AT_ONCE = 500
"""Samples that are looked at together."""


def compute_loss_gradient(net: Net, params: Params, samples: Samples) -> Params:
    """By tensor, the gradient of the mean loss with respect to what devices train and the server combines."""
    total = tree.make_zeros(tree.select_params(params, net.shared_trainable))
    for rows in samples.index.split(SAMPLES_AT_ONCE):
        leaves = {k: params[k].detach().requires_grad_() for k in net.shared_trainable}
        batch = samples.take_batch(rows)
        with use_differentiable_kernels(net.module, net.place):
            loss = net.task.compute_mean_loss(net.forward(params | leaves, batch.inputs)[0], batch) * (
                len(rows) / len(samples)
            )
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        total = tree.add_params(total, dict(zip(leaves, gradients)))
    return total
