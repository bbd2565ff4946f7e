"""CReFF: the server retrains the classifier on features that it makes up (Shang et al. 2022, arXiv:2204.13399)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.extras import Declaration, Extra
from shoal.core.model.heads import find_head_layer
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree, select_params
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Round
from shoal.core.wire import pack_bits, unpack_bits
from shoal.parts.lib.checks import require
from shoal.parts.lib.loss_gradient import SAMPLES_AT_ONCE


@dataclass(frozen=True)
class CReFF(Part):
    """The server retrains the classifier on virtual features, made to give the gradients that devices report.

    Devices train as without it and report the gradient of the last layer for each class that they hold. The server
    keeps `features` virtual features of each class. In `match_steps` steps of rate `match_lr` it changes them so that
    they give the last layer the reported gradients; on them it trains a copy of the layer, for `epochs` epochs in
    batches of `batch` at the rate `lr`. The copy is evaluated, and sent to devices to take the next gradients with.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("shang2022creff",)
    needs_class_logits: ClassVar = True
    reads: ClassVar = frozenset({"extras"})
    neutral: ClassVar = Neutral({"epochs": 0})

    features: int = 100
    match_steps: int = 100
    match_lr: float = 0.1
    epochs: int = 300
    lr: float = 0.01
    batch: int = 32

    def __post_init__(self):
        require(self, "features and batch from 1 to 100,000", 0 < self.features <= 10**5 and 0 < self.batch <= 10**5)
        require(self, "match_steps from 0 to a million", 0 <= self.match_steps <= 10**6)
        require(self, "epochs from 0 to a million", 0 <= self.epochs <= 10**6)
        require(self, "match_lr and lr >= 0", self.match_lr >= 0 and self.lr >= 0)

    def init_server(self, round: Round) -> Tree:
        """The virtual features lie as columns beside the name of the weight that reads them, and are cut like it."""
        weight, bias = find_classifier(round.net, self.name())
        like = round.anchor[weight]
        drawn = round.generator("features").standard_normal((*like.shape, self.features))
        return {
            "features": {weight: torch.from_numpy(drawn).to(like)},
            "head": select_params(round.anchor, [weight, bias]),
        }

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        return {d: {"head": state["head"]} for d in round.devices}, state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        net, samples, head = device.net, device.samples, device.got["head"]
        with torch.no_grad():
            inputs = (samples.take_batch(rows).inputs for rows in samples.index.split(SAMPLES_AT_ONCE))
            x = append_bias_input(torch.cat([net.forward(device.anchor, some)[1] for some in inputs]), head)
        labels = samples.targets.index_select(0, samples.index.to(samples.targets.device))
        one_hot = torch.eye(net.classes).to(x)[labels]
        error, counts = (x @ join_weight_bias(head).T).softmax(1) - one_hot, one_hot.sum(0)
        held = counts.nonzero().flatten().tolist()
        slopes = torch.stack([error[labels == c].T @ x[labels == c] / counts[c] for c in held])
        return {"held": pack_bits(counts > 0), "slopes": slopes[:, mask_kept_classifier(net, head, device.plan)]}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        weight, bias = find_classifier(net, self.name())
        kept = int(mask_kept_classifier(net, select_params(net.initial, [weight, bias]), plan).sum())
        about = "the gradient of the last layer for each class that it holds"
        return {
            "held": Extra("bits", length=net.classes, about="which classes it holds"),
            "slopes": Extra("tensor", shape=(None, kept), most=net.classes * kept, rows="held", about=about),
        }

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        ((weight, columns),) = state["features"].items()
        virtual = self.optimise_features(columns.mT, *self.average_class_gradients(state["head"], round), state["head"])
        head = self.retrain_classifier(virtual, select_params(params, state["head"]), round.generator("batches"))
        return params, {"features": {weight: virtual.mT.contiguous()}, "head": head}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return judged | {"": judged[""] | state["head"]}

    def average_class_gradients(self, head: Params, round: Round) -> tuple[Tensor, Tensor]:
        """By class, the mean gradient over the devices that told it, and which of its elements any of them held."""
        layer = join_weight_bias(head)
        total = layer.new_zeros(len(layer), *layer.shape)
        count = torch.zeros_like(total)
        for reply, share in zip(round.replies, round.weights.tolist(), strict=True):
            if share > 0:
                own, there = reply.report[self.name()], mask_kept_classifier(round.net, head, reply.plan)
                held = unpack_bits(own["held"], torch.Size([len(layer)])).nonzero().flatten().to(layer.device)
                total[held[:, None], *there.nonzero(as_tuple=True)] += own["slopes"].to(layer)
                count[held] += there.to(layer)
        # what no device reported is 0, not 0 / 0
        return total / count.clamp(min=1), count > 0

    def optimise_features(self, virtual: Tensor, target: Tensor, seen: Tensor, head: Params) -> Tensor:
        """Virtual features, classes x features x width, after their steps; those of a class nobody told of stay."""
        layer, classes = join_weight_bias(head), seen.flatten(1).any(1).nonzero().flatten()
        one_hot, seen, target = torch.eye(len(virtual)).to(virtual)[classes, None], seen[classes], target[classes]
        moved = virtual[classes]
        for _ in range(self.match_steps):
            moved = moved.detach().requires_grad_()
            x = append_bias_input(moved, head)
            slope = ((x @ layer.T).softmax(2) - one_hot).mT @ x / self.features
            (gradient,) = torch.autograd.grad(compute_gradient_distance(slope * seen, target, virtual.shape[2]), moved)
            moved = moved - self.match_lr * gradient
        return virtual.index_copy(0, classes, moved.detach())

    def retrain_classifier(self, virtual: Tensor, head: Params, draw: np.random.Generator) -> Params:
        """The layer after its epochs on virtual features."""
        layer, x = join_weight_bias(head).clone(), append_bias_input(virtual.flatten(0, 1), head)
        one_hot = torch.eye(len(virtual)).to(x).repeat_interleave(self.features, 0)
        for _ in range(self.epochs):
            order = torch.from_numpy(draw.permutation(len(x))).to(x.device)
            for some, right in zip(x[order].split(self.batch), one_hot[order].split(self.batch)):
                wrong = (some @ layer.T).softmax(1) - right
                layer.addmm_(wrong.T, some, alpha=-self.lr / len(some))
        return split_weight_bias(layer, head)


def find_classifier(net: Net, part: str) -> tuple[str, str]:
    """The names of its weight and bias, there or not; refused where it does not make the logits of one sample."""
    name, layer = find_head_layer(net, part)
    shape = tuple(net.forward(net.initial, net.make_example_inputs(1))[0].shape)
    if shape != (1, layer.out_features):
        problem = f"{part} needs a last layer that gives a sample a row of logits, and this model gives it {shape}."
        raise ShoalError("bad-part", problem, "Use a model that classifies whole samples, or leave the part out.")
    return f"{name}.weight", f"{name}.bias"


def append_bias_input(x: Tensor, head: Params) -> Tensor:
    """Features with a 1 behind them for the bias, if there is one."""
    return F.pad(x, (0, len(head) - 1), value=1.0)


def mask_kept_classifier(net: Net, head: Params, plan: Plan) -> Tensor:
    """Which elements of the last layer a plan keeps, bias and all."""
    masks = {k: net.slicer.covered_mask(k, v, plan) for k, v in head.items()}
    return join_weight_bias({k: torch.ones_like(head[k]).bool() if mask is None else mask for k, mask in masks.items()})


def join_weight_bias(head: Params) -> Tensor:
    """Weight and bias as one matrix, the bias as its last column; the gradient of it is wrong^T x."""
    weight, *bias = head.values()
    return torch.cat((weight, *(b[:, None] for b in bias)), 1)


def split_weight_bias(layer: Tensor, like: Params) -> Params:
    """Such a matrix as weight and bias again."""
    width = next(iter(like.values())).shape[1]
    return dict(zip(like, (layer[:, :width].clone(), *(b.clone() for b in layer[:, width:].unbind(1)))))


def compute_gradient_distance(a: Tensor, b: Tensor, width: int) -> Tensor:
    """1 - cosine, summed over classes, and in each over the rows of the weight and the bias as one more."""
    return sum_cosine_distances(a[..., :width], b[..., :width]) + sum_cosine_distances(
        a[..., width:].mT, b[..., width:].mT
    )


def sum_cosine_distances(a: Tensor, b: Tensor) -> Tensor:
    # 1e-6: a row of zeros has no direction
    return (1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-6)).sum()
