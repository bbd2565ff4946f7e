"""FedAS: what was received is aligned to the device's own features before training (Yang et al. 2024)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.extras import Declaration, Extra
from shoal.core.measures.confusion import encode_one_hot
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.kernels import use_differentiable_kernels
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import find_last_layers, keep_on_devices

HEAD = "its head, which is averaged for the evaluated model alone"


@dataclass(frozen=True)
class FedAS(Part):
    """The head is each device's own; the body is aligned to the old features, and bodies count by the trace of Fisher.

    Before training, the received body learns for `align_epochs` epochs of batches of `batch` samples, at the rate
    `align_lr`, to give the samples of each class the mean features that the device's previous body gives them. A body
    counts by the sum over such batches of the squared norm of the loss's gradient after training. With `average_head`
    heads are sent up, too, and their average by the same weights is the head of the model that is evaluated.
    """

    cite: ClassVar = ("yang2024fedas",)
    keeps_layers: ClassVar = "head"
    needs_class_logits: ClassVar = True
    needs_whole: ClassVar = True
    reads: ClassVar = frozenset({"extras"})
    sets: ClassVar = frozenset({"weigh"})
    metrics: ClassVar = (Metric("trace", "trace of the Fisher matrix of devices, mean", drawn=True),)

    align_lr: float = 0.01
    align_epochs: int = 1
    batch: int = 16
    average_head: bool = False

    def __post_init__(self):
        require(self, "align_lr >= 0", self.align_lr >= 0)
        require(self, "align_epochs >= 0 and batch >= 1", self.align_epochs >= 0 and self.batch >= 1)

    def model(self, net: Net) -> Net:
        return keep_on_devices(net, find_last_layers(net, 1, self.name()), self.name())

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        if "body" not in memory or not device.net.shared_trainable:  # nothing to align to, or nothing that may move
            return params, {}
        means = compute_class_features(device.net, params | memory["body"], device.samples)
        generator = device.generator("align")
        for _ in range(self.align_epochs):
            order = torch.randperm(len(device.samples), generator=generator)
            for rows in device.samples.index[order].split(self.batch):
                gradient = compute_alignment_gradient(device.net, params, device.samples, rows, means)
                params = params | {k: params[k] - self.align_lr * g for k, g in gradient.items()}
        return params, {}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"body": tree.select_params(params, device.net.names_with_role("shared"))}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        trace = compute_fisher_trace(device.net, params, device.samples, self.batch).float()
        return {"trace": trace} | {name_sent_tensor(k): params[k] for k in self.find_sent_head(device.net)}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        trace = Extra(low=0, about="the squared norm of its loss's gradient, summed over batches")
        sent = {k: net.initial[k] for k in self.find_sent_head(net)}
        return {"trace": trace} | {
            name_sent_tensor(k): Extra("tensor", str(v.dtype).removeprefix("torch."), shape=tuple(v.shape), about=HEAD)
            for k, v in sent.items()
        }

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        traces = torch.stack([r.report[self.name()]["trace"].to(weights) for r in round.replies])
        counted = torch.where(weights > 0, traces, torch.zeros_like(traces))
        round.tell("trace", traces.mean())
        return (counted if bool(counted.sum() > 0) else weights), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        head = {}
        for name in self.find_sent_head(round.net):
            sent = [reply.report[self.name()][name_sent_tensor(name)] for reply in round.replies]
            head[name] = sum(float(weight) * value for weight, value in zip(round.weights, sent))
        return params, {"head": head} if head else state

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return {name: params | state.get("head", {}) for name, params in judged.items()}

    def find_sent_head(self, net: Net) -> tuple[str, ...]:
        return find_last_layers(net, 1, self.name()) if self.average_head else ()

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        return params | memory.get("body", {})


def name_sent_tensor(name: str) -> str:
    """Under which name a tensor of the head travels."""
    return f"head {name}"


@torch.no_grad()
def compute_class_features(net: Net, params: Params, samples: Samples) -> Tensor:
    """The mean features of each class, classes in rows; zeros for a class that is not there."""
    sums, counts = None, torch.zeros(net.classes, dtype=net.dtype, device=net.place)
    for rows in samples.index.split(500):
        features, members = read_members(net, params, samples, rows)
        sums = members.T @ features if sums is None else sums + members.T @ features
        counts = counts + members.sum(0)
    assert sums is not None
    return sums / counts.clamp(min=1).unsqueeze(1)


def compute_alignment_gradient(net: Net, params: Params, samples: Samples, rows: Tensor, means: Tensor) -> Params:
    """The gradient of the sum over the classes of a batch of the mean squared distance of features from their mean."""
    leaves = {k: params[k].detach().requires_grad_() for k in net.shared_trainable}
    with torch.enable_grad(), use_differentiable_kernels(net.module, net.place):
        features, members = read_members(net, params | leaves, samples, rows)
        apart = (features - members @ means).square().mean(1)
        loss = ((members.T @ apart) / members.sum(0).clamp(min=1)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, gradients))


def read_members(net: Net, params: Params, samples: Samples, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Features of samples, or of their positions, one in each row; and, one-hot, the class of each."""
    batch = samples.take_batch(rows)
    features = net.forward(params, batch.inputs)[1]
    return features.flatten(0, -2), encode_one_hot(batch.targets[0][0].flatten(), net.classes).to(net.dtype)


def compute_fisher_trace(net: Net, params: Params, samples: Samples, size: int) -> Tensor:
    """The squared norm of the gradient of the mean loss, of all that is trained, summed over batches of `size`."""
    trace = torch.zeros((), dtype=torch.float64)
    for rows in samples.index.split(size):
        leaves, batch = {k: params[k].detach().requires_grad_() for k in net.trainable}, samples.take_batch(rows)
        with torch.enable_grad(), use_differentiable_kernels(net.module, net.place):
            loss = net.task.compute_mean_loss(net.forward(params | leaves, batch.inputs)[0], batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        trace = trace + torch.stack([g.double().square().sum() for g in gradients]).sum().cpu()
    return trace
