"""FedALA: a device learns how much of the shared head to take over, number by number (Zhang et al. 2023)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.batch import Samples
from shoal.core.model import tree
from shoal.core.model.kernels import use_differentiable_kernels
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import find_last_layers


@dataclass(frozen=True)
class FedALA(Part):
    """The last layer starts from own + A (received - own), with A in [0, 1] learnt on the device; the rest as received.

    own is what the device trained last time. A starts at 1 and goes along the gradient at the rate `eta`, in batches of
    `batch` samples, over the share `sample_share` of the samples: `first_epochs` times at first, later once in every
    round. `layers` is how many of the last layers are mixed.
    """

    cite: ClassVar = ("zhang2023fedala",)
    needs_whole: ClassVar = True
    neutral: ClassVar = Neutral({"eta": 0.0})

    eta: float = 1.0
    sample_share: float = 0.8
    first_epochs: int = 10
    batch: int = 10
    layers: int = 1

    def __post_init__(self):
        require(self, "eta >= 0 and sample_share above 0 and at most 1", self.eta >= 0 and 0 < self.sample_share <= 1)
        least = min(self.first_epochs, self.batch, self.layers)
        require(self, "first_epochs, batch and layers >= 1", least >= 1)

    def init_server(self, round: Round) -> Tree:
        if not self.find_mixed(round.net):
            round.log("The last layers stay on devices already, so that there is nothing to mix them with.")
        return {}

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        if not memory.get("own"):
            return params, {}
        mixed, share = self.mix_models(params, memory, device)
        return mixed, {"share": share}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        own = tree.select_params(params, self.find_mixed(device.net))
        return params, {"own": own} | state

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        return self.mix_models(params, memory, device)[0] if memory.get("own") else params

    def find_mixed(self, net: Net) -> tuple[str, ...]:
        last = find_last_layers(net, self.layers, self.name())
        return tuple(name for name in net.shared_trainable if name in last)

    def mix_models(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Params]:
        """The received model with a mixed last layer, and the shares of it that were learnt."""
        own, samples = memory["own"], device.samples
        share = memory.get("share") or {k: torch.ones_like(v) for k, v in own.items()}
        generator = device.generator("mixture")
        count = max(1, round(self.sample_share * len(samples)))
        for _ in range(1 if "share" in memory else self.first_epochs):
            order = torch.randperm(len(samples), generator=generator)[:count]
            for rows in samples.index[order].split(self.batch):
                share = learn_shares(device.net, params, own, share, samples, rows, self.eta)
        return params | mix_tensors(params, own, share), share


def mix_tensors(params: Params, own: Params, share: Params) -> Params:
    """own + A (received - own), by tensor."""
    return {k: torch.lerp(o, params[k], share[k]) for k, o in own.items()}


def learn_shares(
    net: Net, params: Params, own: Params, share: Params, samples: Samples, rows: torch.Tensor, eta: float
) -> Params:
    """The shares after one step along the gradient of the loss on a batch, kept within 0 and 1."""
    batch = samples.take_batch(rows)
    leaves = {k: v.detach().requires_grad_() for k, v in mix_tensors(params, own, share).items()}
    with torch.enable_grad(), use_differentiable_kernels(net.module, net.place):
        loss = net.task.compute_mean_loss(net.forward(params | leaves, batch.inputs)[0], batch)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    steps = {k: g * (params[k] - own[k]) for k, g in zip(leaves, gradients)}
    return {k: (share[k] - eta * step).clamp(0, 1) for k, step in steps.items()}
