"""MOON: features like the received model's, and unlike the last local one's (Li et al. 2021, arXiv:2103.16257)."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model import tree
from shoal.core.model.heads import find_head_layer, replace_head
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.core.wire import copy_tensor_bytes
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class MOON(Part):
    """Draws features towards the received model's and away from the device's last local model's.

    It adds mu CE([cos(z, z_received), cos(z, z_previous)] / temperature, 0) to the loss: the received model is the
    right answer. z are `width` numbers that two new layers make of the features, and that the last layer reads; with
    width 0 they are the features themselves. All three models go through the same scorer, so what parts listed behind
    this one do to a model holds for each of them.
    """

    cite: ClassVar = ("li2021moon",)
    makes_features: ClassVar = True
    neutral: ClassVar = Neutral({"mu": 0.0})

    mu: float = 5.0
    temperature: float = 0.5
    width: int = 256

    def __post_init__(self):
        require(self, "mu >= 0 and temperature > 0", self.mu >= 0 and self.temperature > 0)
        require(self, "width from 0 to a million", 0 <= self.width <= 10**6)

    def model(self, net: Net) -> Net:
        name, _ = find_head_layer(net, self.name())
        if not self.width:
            return net
        new_net = replace_head(net, lambda old: build_projection_head(old, self.width), {}, self.name(), MOVED_TENSORS)
        return replace(new_net, head=f"{name}.out")

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        slicer, received = device.net.slicer, tree.select_params(device.anchor, device.net.shared_trainable)
        small = slicer.take(memory.get("previous", received), device.plan)
        return params, {"previous": fill_missing_units(slicer.place(small, received, device.plan), received)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_contrastive(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            others = (local.anchor, local.anchor | local.state["previous"])
            seen = (inner(tree.select_params(other, params), batch).features.detach() for other in others)
            near, far = (F.cosine_similarity(scored.features, z, dim=-1) for z in seen)
            losses = F.softplus((far - near) / self.temperature)  # the cross-entropy of two logits
            term = batch.mean(losses.reshape(len(losses), -1).mean(1))
            return scored._replace(loss=scored.loss + self.mu * term)

        return score_contrastive

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        own = tree.select_params(params, device.net.shared_trainable)
        return params, {"previous": fill_missing_units(own, memory.get("previous", own))}


MOVED_TENSORS = {("weight", 1): "hidden.weight", ("weight", 0): "out.weight", ("bias", 0): "out.bias"}
"""Which tensors of the new last layer have the columns and the rows that the old one had."""


def build_projection_head(old: nn.Linear, width: int) -> nn.Sequential:
    """Features to z to the outputs of the old layer, whose weight is the seed."""
    seed = blake2b(copy_tensor_bytes(old.weight.float()), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))

    def make_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
        made = nn.Linear(inputs, outputs, bias, device="meta")
        for key, like in list(made.named_parameters()):
            drawn = torch.rand(like.shape, generator=generator, dtype=torch.float64)
            made.register_parameter(key, nn.Parameter((2 * drawn - 1) / inputs**0.5))
        return made

    hidden, z = make_linear(old.in_features, old.in_features), make_linear(old.in_features, width)
    out = make_linear(width, old.out_features, old.bias is not None)
    return nn.Sequential(OrderedDict(hidden=hidden, relu=nn.ReLU(), z=z, out=out))


def fill_missing_units(model: Params, other: Params) -> Params:
    """A model, with what it lacks taken from another: units that it was not sent are 0 in it."""
    return {k: torch.where(v == 0, other[k], v) for k, v in model.items()}
