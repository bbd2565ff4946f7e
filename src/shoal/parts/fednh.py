"""FedNH: prototypes of the classes, which devices do not train, as last layer (Dai et al. 2023, arXiv:2212.02758)."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.batch import BatchScore
from shoal.core.errors import ShoalError
from shoal.core.extras import Declaration, Extra
from shoal.core.model import tree
from shoal.core.model.heads import extend_axis_columns, find_head_layer, replace_head
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local, Round
from shoal.core.wire import copy_tensor_bytes
from shoal.parts.lib.checks import require
from shoal.parts.lib.label_counts import count_labels
from shoal.parts.lib.loss_gradient import SAMPLES_AT_ONCE


@dataclass(frozen=True)
class FedNH(Part):
    """The last layer holds prototypes of the classes, which devices do not train and the server moves.

    Logits are scale <z, W_c>, where z are the features at length 1 and W_c is the prototype of class c. Prototypes
    start far from each other. Devices report the mean direction of each class that they hold, and the server moves W_c
    the share 1 - `rho` of the way there. The rest of the model and the scale, which starts at `scale`, are averaged,
    every reply alike.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("dai2023fednh",)
    needs_class_logits: ClassVar = True
    reads: ClassVar = frozenset({"extras"})
    sets: ClassVar = frozenset({"weigh"})

    rho: float = 0.9
    scale: float = 1.0

    def __post_init__(self):
        require(self, "0 <= rho <= 1 and scale > 0", 0 <= self.rho <= 1 and self.scale > 0)

    def model(self, net: Net) -> Net:
        name, layer = find_head_layer(net, self.name())
        if layer.out_features != net.classes:
            problem = f"fednh needs {net.classes} prototypes, and the last linear layer has {layer.out_features} rows."
            raise ShoalError("bad-part", problem, "Use a model whose last linear layer makes the logits.")
        roles = {"prototypes.weight": "server", "read": "personal"}
        new_net = replace_head(net, lambda old: PrototypeHead(old, self.scale), roles, self.name())
        axes = (extend_axis_columns(axis, f"{name}.weight", [f"{name}.{k}" for k in roles]) for axis in net.axes)
        axes = (replace(a, cuts=tuple(cut for cut in a.cuts if cut.tensor in new_net.initial)) for a in axes)
        return replace(new_net, axes=tuple(axes), head=f"{name}.prototypes")

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        read = name_head_tensor(device.net, "read")
        return params | {read: torch.ones_like(params[read])}, {}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        return update | tree.make_zeros(tree.select_params(update, [name_head_tensor(local.net, "read")])), state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        net, samples, weight = device.net, device.samples, name_head_tensor(device.net, "prototypes.weight")
        total = torch.zeros_like(params[weight], device="cpu")  # where sums come out the same each time
        with torch.no_grad():
            for rows in samples.index.split(SAMPLES_AT_ONCE):
                batch = samples.take_batch(rows)
                seen = net.forward(params, batch.inputs)[1].flatten(0, -2) * params[name_head_tensor(net, "scale")]
                total.index_add_(0, batch.targets[0][0].flatten().cpu(), F.normalize(seen, dim=1).cpu())
        counts, columns = count_labels(samples, net.classes), find_kept_columns(net, weight, device.plan)
        return {"counts": counts, "means": F.normalize(total[counts > 0], dim=1)[:, columns].to(net.place)}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        weight = name_head_tensor(net, "prototypes.weight")
        columns = net.initial[weight][:, find_kept_columns(net, weight, plan)].shape[1]
        about = "the mean direction of the features of each class that it holds"
        return {
            "counts": Extra("classes", "int", low=0, about="how many samples of each class it holds"),
            "means": Extra("tensor", shape=(None, columns), most=net.classes * columns, rows="counts", about=about),
        }

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return (weights > 0).to(weights.dtype), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        weight = name_head_tensor(round.net, "prototypes.weight")
        old = params[weight]
        total = torch.zeros_like(old)
        for reply, share in zip(round.replies, round.weights.tolist(), strict=True):
            if share > 0:
                report = reply.report[self.name()]
                held = report["counts"].nonzero().flatten()
                means = old.new_zeros(len(held), old.shape[1])
                means[:, find_kept_columns(round.net, weight, reply.plan)] = report["means"].to(old)
                total.index_add_(0, held.to(old.device), means * report["counts"][held, None].to(old))
        new = self.rho * old + (1 - self.rho) * F.normalize(total, dim=1)
        # directions can cancel, and a prototype needs one: then the old one stays
        new = torch.where(new.norm(dim=1, keepdim=True) > 1e-12, new, old)
        return params | {weight: F.normalize(new, dim=1)}, state


class PrototypeHead(nn.Module):
    """The last layer: a linear one without bias that reads features brought to the length `scale`.

    Units that a device leaves out count as 0: those whose column of W is 0, and those that a part masks in the loss. It
    does so where they are read, among what devices train; W is not, so `read` is, which is 1 and never moves.
    """

    def __init__(self, old: nn.Linear, scale: float):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.read = nn.Parameter(torch.ones(1, old.in_features))
        self.prototypes = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
        self.prototypes.weight = nn.Parameter(init_prototypes(old))

    def forward(self, x: Tensor) -> Tensor:
        held = self.read.detach() * self.prototypes.weight.ne(0).any(0)
        return self.prototypes(self.scale * F.normalize(x * held, dim=-1))


def init_prototypes(old: nn.Linear) -> Tensor:
    """Directions at right angles, or any where there are more of them than features; the old weight is the seed."""
    seed = blake2b(copy_tensor_bytes(old.weight.float()), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    drawn = torch.randn(old.weight.shape, generator=generator, dtype=torch.float64)
    if old.out_features > old.in_features:
        return F.normalize(drawn, dim=1)
    q, r = torch.linalg.qr(drawn.T)
    return (q * r.diagonal().sign()).T.contiguous()


def name_head_tensor(net: Net, name: str) -> str:
    """The full name of a tensor of the last layer."""
    return f"{net.head_name.rpartition('.')[0]}.{name}"


def find_kept_columns(net: Net, weight: str, plan: Plan) -> Tensor | slice:
    """The features that a plan keeps."""
    return net.slicer.find_kept_lines(weight, net.initial[weight], plan).get(1, slice(None))
