"""One local step as a pure function: gradient, clipping, weight decay, steps of parts, optimiser, masks.

Nothing here mutates, draws random numbers or branches on data, so that engines can batch, trace and compile it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.compose import Method
from shoal.core.local.accumulate import accumulate_gradients
from shoal.core.local.layer_overrides import replay_layer_draws
from shoal.core.model import tree
from shoal.core.model.heads import list_side_tensors
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.optimiser import Optimiser, clip_apart, is_set
from shoal.core.types import Local


class LocalState(NamedTuple):
    """What changes from step to step on a device: parameters, buffers, `slots` of the optimiser, states of parts.

    A padded step leaves all of it as it was (`gate_padded_step`).
    """

    params: Params
    buffers: Params
    slots: Tree
    states: dict[str, Tree]


class StepContext(NamedTuple):
    """What a step reads: `got` and `draws` by part, `numbers` like lr, `mask` where a plan trains less than all."""

    anchor: Params
    got: dict[str, dict[str, Any]]
    numbers: dict[str, Tensor]
    draws: dict[str, dict[str, Tensor]]
    mask: Params


@dataclass(frozen=True, eq=False)
class StepRule:
    """What all local steps of a run have in common: the net, the method, the optimiser."""

    net: Net
    method: Method
    optimiser: Optimiser

    @cached_property
    def taps(self) -> tuple[str, ...]:
        """The layers whose outputs or inputs parts want to see."""
        return self.method.taps(self.net)

    @cached_property
    def clipped_apart(self) -> tuple[tuple[str, ...], ...]:
        """The trained tensors that are not clipped with the shared ones: those of the model that stay on their device,
        and those beside the model."""
        beside = list_side_tensors(self.net)
        personal = (k for k in self.net.trainable if self.net.roles.get(k) == "personal")
        return tuple(k for k in personal if k not in beside), beside

    def init_state(self, params: Params, states: dict[str, Tree], slots: Tree | None = None) -> LocalState:
        """The state before the first step, with the states that `begin` of each part returned.

        The optimiser begins anew, unless `slots` are what it had after an earlier round.
        """
        trained = {k: params[k] for k in self.net.trainable}
        slots = self.optimiser.init_slots(trained) if slots is None else slots
        return LocalState(trained, {k: params[k] for k in self.net.buffers}, slots, states)

    def make_scorer(self, buffers: Params) -> Scorer:
        """(parameters, batch) -> the task's loss and outputs of the model in training; parts wrap it at `objective`."""

        def score_batch(params: Params, batch: Batch) -> BatchScore:
            outputs = self.net.forward(params | buffers, batch.inputs, self.taps, training=True)
            logits, features, taps, new_buffers = outputs
            loss = self.net.task.compute_mean_loss(logits, batch)
            return BatchScore(loss, logits, features, taps, buffers | new_buffers, {})

        return score_batch


def advance(
    rule: StepRule, local_state: LocalState, batch: Batch, context: StepContext, gradient: GradientFunction
) -> tuple[LocalState, BatchScore]:
    """One local step of a device, params - lr * update; the new state, and the score of the batch.

    The update is the gradient after clipping, weight decay, `step` of each part in its order, optimiser, and masks.
    """
    params, buffers, slots, states = local_state
    optimiser, method = rule.optimiser, rule.method
    if optimiser.schedule:
        context = context._replace(numbers=optimiser.schedule.scale_lr(context.numbers))
    if optimiser.micro_batch:
        gradient = accumulate_gradients(gradient, optimiser.micro_batch)

    def view_for_part(name: str) -> Local:
        got, draws = context.got.get(name, {}), context.draws.get(name, {})
        return Local(rule.net, context.anchor, got, context.numbers, draws, states.get(name, {}))

    masks = [part.mask(view_for_part(part.name())) for part in method.parts_at("mask")]
    gradient = mask_gradient(gradient, masks)
    scorer = rule.make_scorer(buffers)
    for part in reversed(method.parts_at("objective")):
        scorer = part.objective(scorer, view_for_part(part.name()))
    if parts := method.parts_at("gradient"):
        gradient = mask_gradient(replay_layer_draws(gradient), (context.mask, *collect_masks(states)))
        for part in reversed(parts):
            gradient = part.gradient(gradient, view_for_part(part.name()))
    update, scored = gradient(scorer, params, batch)

    if is_set(optimiser.clip):
        # what a plan leaves at 0 may have a gradient here, and would be clipped with what is trained
        update = mask_update(update, (context.mask, *collect_masks(states)))
        update = clip_apart(update, optimiser.clip, rule.clipped_apart)
    update = optimiser.add_weight_decay(update, params)
    for part in method.parts_at("step"):
        name = part.name()
        local = view_for_part(name)._replace(loss_at=lambda at: scorer(at, batch).loss)
        update, state = part.step(update, states[name], scored, local)
        states = states | {name: state}
    update = mask_update(update, masks)
    update, slots = optimiser.step(update, slots, params)
    if optimiser.lr_groups:
        update = optimiser.scale_groups(update)
    update = mask_update(update, (context.mask, *masks, *collect_masks(states)))

    lr = context.numbers["lr"]
    params = {k: torch.addcmul(p, update[k], lr, value=-1) for k, p in params.items()}
    return LocalState(params, scored.buffers, slots, states), scored


def gate_padded_step(live: Tensor, new: LocalState, old: LocalState) -> LocalState:
    """The new state where `live` is true, the old one where the step is padding."""
    return LocalState(*(tree.select_where(live, n, o) for n, o in zip(new, old)))


def compute_autograd_gradient(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
    """The gradient by `torch.autograd`, for one device; faster there than `torch.func`, which can be batched."""
    leaves = {k: p.detach().requires_grad_() for k, p in params.items()}
    with torch.enable_grad():
        scored = scorer(leaves, batch)
    grads = torch.autograd.grad(scored.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads)), detach_score(scored)


def compute_func_gradient(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
    """The gradient by `torch.func.grad`, which works under `vmap`."""

    def compute_loss(at: Params) -> tuple[Tensor, BatchScore]:
        scored = scorer(at, batch)
        return scored.loss, scored

    return torch.func.grad(compute_loss, has_aux=True)(params)


def detach_score(scored: BatchScore) -> BatchScore:
    """The score cut off from autograd's graph."""
    loss, logits, features, *dicts = scored
    return BatchScore(loss.detach(), logits.detach(), features.detach(), *(tree.detach_params(d) for d in dicts))


def mask_gradient(gradient: GradientFunction, masks: Sequence[Params]) -> GradientFunction:
    """The same gradient, but 0 for what is not trained, so that parts which follow it leave that alone."""
    if not any(masks):
        return gradient

    def compute_masked(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
        update, scored = gradient(scorer, params, batch)
        return mask_update(update, masks), scored

    return compute_masked


def mask_update(update: Params, masks: Sequence[Params]) -> Params:
    """The update times each of these masks, which leave out tensors that are trained whole."""
    for mask in masks:
        update = {k: u * mask[k] if k in mask else u for k, u in update.items()}
    return update


def collect_masks(states: dict[str, Tree]) -> list[Params]:
    """The masks that parts keep in their local states under the key "mask"."""
    return [s["mask"] for s in states.values() if isinstance(s, dict) and "mask" in s]
