"""FedROD: a generic model that favours no class, and a head of one's own (Chen and Chao 2022, arXiv:2107.00778)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.errors import ShoalError
from shoal.core.model.heads import add_side_tensors, find_head_layer
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local
from shoal.parts.lib.class_priors import compute_log_prior
from shoal.parts.lib.side_loss import add_side_loss


@dataclass(frozen=True)
class FedROD(Part):
    """The model learns with the balanced softmax, and a personal linear head learns what is left.

    The head stays on its device and reads the features; its logits are added to the model's, and cross-entropy of the
    sum moves the head alone.
    """

    cite: ClassVar = ("chen2022fedrod",)
    needs_class_logits: ClassVar = True
    replaces_loss: ClassVar = True

    def model(self, net: Net) -> Net:
        _, layer = find_head_layer(net, self.name())
        own = {"weight": torch.zeros(net.classes, layer.in_features)}
        if layer.bias is not None:
            own["bias"] = torch.zeros(net.classes)
        return add_side_tensors(net, "rod", own, "personal", ("weight",))

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"prior": compute_log_prior(device)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_both_heads(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            generic = local.net.task.compute_mean_loss(scored.logits + local.state["prior"], batch)
            known = local.anchor | params
            own = F.linear(
                scored.features.detach(), *(find_head_tensor(known, key) for key in list_head_keys(local.net))
            )
            if own.shape != scored.logits.shape:
                problem = f"fedrod adds logits of shape {tuple(own.shape)} to the model's {tuple(scored.logits.shape)}."
                raise ShoalError("bad-part", problem, "Use a model whose last linear layer makes the logits.")
            summed = local.net.task.compute_mean_loss(own + scored.logits.detach(), batch)
            return add_side_loss(scored._replace(loss=generic), summed)

        return score_both_heads

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        """Both heads are linear in the same features: their summed tensors give their summed logits."""
        name, keys = device.net.head_name, list_head_keys(device.net)
        return params | {f"{name}.{k}": params[f"{name}.{k}"] + find_head_tensor(params, k) for k in keys}


def list_head_keys(net: Net) -> tuple[str, ...]:
    """What a head has: a bias only where the model's last layer has one, to which it can be added."""
    has_bias = f"{net.head_name}.bias" in net.initial and any(f".{name}".endswith(".rod.bias") for name in net.initial)
    return ("weight", "bias") if has_bias else ("weight",)


def find_head_tensor(params: Params, key: str) -> Tensor:
    """A tensor of the head; a part that wraps the model puts something before its name."""
    return next(value for name, value in params.items() if f".{name}".endswith(f".rod.{key}"))
