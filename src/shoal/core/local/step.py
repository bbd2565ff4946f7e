"""One device's training as a pure function: no mutation, no draw, no branch on data between `begin` and `end`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.compose import Method
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.types import Batch, Local, Optimiser, Scored, Scorer


class Course(NamedTuple):
    """The running values of a local run; all of them are gated on padded steps."""

    params: Params
    buffers: Params
    velocity: Params
    states: dict[str, Tree]


class Scene(NamedTuple):
    """What surrounds one step: `got` and `draws` by part, `mask` where less than the whole model is trained."""

    anchor: Params
    got: dict[str, dict[str, Any]]
    numbers: dict[str, Tensor]
    draws: dict[str, dict[str, Tensor]]
    mask: Params


@dataclass(frozen=True, eq=False)
class Rule:
    """How a step is made: the net, the method, the optimiser."""

    net: Net
    method: Method
    optimiser: Optimiser

    @cached_property
    def taps(self) -> tuple[str, ...]:
        return self.method.taps(self.net)

    def start(self, params: Params, states: dict[str, Tree]) -> Course:
        own = {k: params[k] for k in self.net.trainable}
        velocity = tree.zeros(own) if self.optimiser.momentum else {}
        return Course(own, {k: params[k] for k in self.net.buffers}, velocity, states)

    def scorer(self, buffers: Params) -> Scorer:
        """The plain score of a batch, which the parts' objectives wrap."""

        def score(params: Params, batch: Batch) -> Scored:
            made = self.net.apply(params | buffers, batch.inputs, self.taps, training=True)
            logits, features, taps, new_buffers = made
            loss = mean_loss(logits, batch)
            return Scored(loss, logits, features, taps, buffers | new_buffers, {})

        return score


Gradient = Callable[[Scorer, Params, Batch], tuple[Params, Scored]]


def advance(rule: Rule, course: Course, batch: Batch, scene: Scene, gradient: Gradient) -> tuple[Course, Scored]:
    """One step: gradient, clipping, weight decay, the parts in their order, momentum, last the masks."""
    params, buffers, velocity, states = course
    optimiser, method = rule.optimiser, rule.method

    def seen_by(name: str) -> Local:
        got, draws = scene.got.get(name, {}), scene.draws.get(name, {})
        return Local(rule.net, scene.anchor, got, scene.numbers, draws, states.get(name, {}))

    scorer = rule.scorer(buffers)
    for part in reversed(method.at("objective")):
        scorer = part.objective(scorer, seen_by(part.name()))
    update, scored = gradient(scorer, params, batch)

    if given(optimiser.clip):
        update = clipped(update, optimiser.clip)
    if given(optimiser.weight_decay):
        update = {k: u + optimiser.weight_decay * params[k] for k, u in update.items()}
    for part in method.at("step"):
        name = part.name()
        update, state = part.step(update, states[name], scored, seen_by(name))
        states = states | {name: state}
    if velocity:
        update = velocity = {k: optimiser.momentum * velocity[k] + u for k, u in update.items()}
    for mask in (scene.mask, *masks_in(states)):
        update = {k: u * mask[k] if k in mask else u for k, u in update.items()}

    lr = scene.numbers["lr"]
    params = {k: torch.addcmul(p, update[k], lr, value=-1) for k, p in params.items()}
    return Course(params, scored.buffers, velocity, states), scored


def gated(live: Tensor, new: Course, old: Course) -> Course:
    """The new course where the step was a real one, the old one where it was padding."""
    return Course(*(tree.chosen(live, n, o) for n, o in zip(new, old)))


def autograd(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, Scored]:
    """The gradient of one device at a time; `torch.func` gives the same for many, at a price for one."""
    leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
    scored = scorer(leaves, batch)
    grads = torch.autograd.grad(scored.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads)), plain(scored)


def functional(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, Scored]:
    """The gradient as torch.func sees it."""

    def loss(own: Params) -> tuple[Tensor, Scored]:
        scored = scorer(own, batch)
        return scored.loss, scored

    return torch.func.grad(loss, has_aux=True)(params)


def plain(scored: Scored) -> Scored:
    """The score without its graph."""
    loss, logits, features, *dicts = scored
    return Scored(loss.detach(), logits.detach(), features.detach(), *(tree.detach(d) for d in dicts))


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy; over each list of targets with its weight, over positions where a sample has several."""
    total = torch.zeros((), dtype=logits.dtype, device=logits.device) if len(batch.targets) > 1 else None
    for targets, weight in batch.targets:
        losses = sample_losses(logits, targets)
        loss = batch.mean(losses if weight is None else losses * weight)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def sample_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each sample."""
    if logits.dim() == 3:
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
    return F.cross_entropy(logits, targets, reduction="none")


def given(number: float | Tensor) -> bool:
    """Whether a number of the optimiser is set; one that differs between lanes is a tensor, and always counts."""
    return isinstance(number, Tensor) or number != 0


def clipped(update: Params, bound: float | Tensor) -> Params:
    """An update of at most this norm; a bound of 0, as one of several lanes may have it, is none."""
    norm = torch.stack([u.square().sum() for u in update.values()]).sum().sqrt()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(bound, Tensor):
        factor = torch.where(bound > 0, factor, torch.ones_like(factor))
    return tree.scale(update, factor)


def masks_in(states: dict[str, Tree]):
    """The masks that parts keep in their states under the name "mask"."""
    return [s["mask"] for s in states.values() if isinstance(s, dict) and "mask" in s]
