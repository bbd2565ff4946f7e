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
from shoal.core.types import Batch, BatchScore, Local, Optimiser, Scorer


class LocalState(NamedTuple):
    """The running values of a local run; all of them are gated on padded steps."""

    params: Params
    buffers: Params
    velocity: Params
    states: dict[str, Tree]


class StepContext(NamedTuple):
    """What surrounds one step: `got` and `draws` by part, `mask` where less than the whole model is trained."""

    anchor: Params
    got: dict[str, dict[str, Any]]
    numbers: dict[str, Tensor]
    draws: dict[str, dict[str, Tensor]]
    mask: Params


@dataclass(frozen=True, eq=False)
class StepRule:
    """How a step is made: the net, the method, the optimiser."""

    net: Net
    method: Method
    optimiser: Optimiser

    @cached_property
    def taps(self) -> tuple[str, ...]:
        return self.method.taps(self.net)

    def init_state(self, params: Params, states: dict[str, Tree]) -> LocalState:
        own = {k: params[k] for k in self.net.trainable}
        velocity = tree.make_zeros(own) if self.optimiser.momentum else {}
        return LocalState(own, {k: params[k] for k in self.net.buffers}, velocity, states)

    def make_scorer(self, buffers: Params) -> Scorer:
        """The plain score of a batch, which the parts' objectives wrap."""

        def score_batch(params: Params, batch: Batch) -> BatchScore:
            made = self.net.forward(params | buffers, batch.inputs, self.taps, training=True)
            logits, features, taps, new_buffers = made
            loss = compute_mean_loss(logits, batch)
            return BatchScore(loss, logits, features, taps, buffers | new_buffers, {})

        return score_batch


GradientFunction = Callable[[Scorer, Params, Batch], tuple[Params, BatchScore]]


def advance(
    rule: StepRule, course: LocalState, batch: Batch, scene: StepContext, gradient: GradientFunction
) -> tuple[LocalState, BatchScore]:
    """One step: gradient, clipping, weight decay, the parts in their order, momentum, last the masks."""
    params, buffers, velocity, states = course
    optimiser, method = rule.optimiser, rule.method

    def view_for_part(name: str) -> Local:
        got, draws = scene.got.get(name, {}), scene.draws.get(name, {})
        return Local(rule.net, scene.anchor, got, scene.numbers, draws, states.get(name, {}))

    scorer = rule.make_scorer(buffers)
    for part in reversed(method.parts_at("objective")):
        scorer = part.objective(scorer, view_for_part(part.name()))
    update, scored = gradient(scorer, params, batch)

    if is_set(optimiser.clip):
        update = clip_update(update, optimiser.clip)
    if is_set(optimiser.weight_decay):
        update = {k: u + optimiser.weight_decay * params[k] for k, u in update.items()}
    for part in method.parts_at("step"):
        name = part.name()
        update, state = part.step(update, states[name], scored, view_for_part(name))
        states = states | {name: state}
    if velocity:
        update = velocity = {k: optimiser.momentum * velocity[k] + u for k, u in update.items()}
    for mask in (scene.mask, *collect_masks(states)):
        update = {k: u * mask[k] if k in mask else u for k, u in update.items()}

    lr = scene.numbers["lr"]
    params = {k: torch.addcmul(p, update[k], lr, value=-1) for k, p in params.items()}
    return LocalState(params, scored.buffers, velocity, states), scored


def gate_padded_step(live: Tensor, new: LocalState, old: LocalState) -> LocalState:
    """The new course where the step was a real one, the old one where it was padding."""
    return LocalState(*(tree.select_where(live, n, o) for n, o in zip(new, old)))


def compute_autograd_gradient(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
    """The gradient of one device at a time; `torch.func` gives the same for many, at a price for one."""
    leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
    scored = scorer(leaves, batch)
    grads = torch.autograd.grad(scored.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads)), detach_score(scored)


def compute_func_gradient(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
    """The gradient as torch.func sees it."""

    def compute_loss(own: Params) -> tuple[Tensor, BatchScore]:
        scored = scorer(own, batch)
        return scored.loss, scored

    return torch.func.grad(compute_loss, has_aux=True)(params)


def detach_score(scored: BatchScore) -> BatchScore:
    """The score without its graph."""
    loss, logits, features, *dicts = scored
    return BatchScore(loss.detach(), logits.detach(), features.detach(), *(tree.detach_params(d) for d in dicts))


def compute_mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy; over each list of targets with its weight, over positions where a sample has several."""
    total = torch.zeros((), dtype=logits.dtype, device=logits.device) if len(batch.targets) > 1 else None
    for targets, weight in batch.targets:
        losses = compute_sample_losses(logits, targets)
        loss = batch.mean(losses if weight is None else losses * weight)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def compute_sample_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each sample."""
    if logits.dim() == 3:
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
    return F.cross_entropy(logits, targets, reduction="none")


def is_set(number: float | Tensor) -> bool:
    """Whether a number of the optimiser is set; one that differs between lanes is a tensor, and always counts."""
    return isinstance(number, Tensor) or number != 0


def clip_update(update: Params, bound: float | Tensor) -> Params:
    """An update of at most this norm; a bound of 0, as one of several lanes may have it, is none."""
    norm = torch.stack([u.square().sum() for u in update.values()]).sum().sqrt()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(bound, Tensor):
        factor = torch.where(bound > 0, factor, torch.ones_like(factor))
    return tree.scale_params(update, factor)


def collect_masks(states: dict[str, Tree]):
    """The masks that parts keep in their states under the name "mask"."""
    return [s["mask"] for s in states.values() if isinstance(s, dict) and "mask" in s]
