"""One local step of a stack of devices as a function of flat lists of tensors, ready to be traced."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.batch import Batch
from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.step import (
    LocalState,
    StepContext,
    advance,
    compute_autograd_gradient,
    compute_func_gradient,
    gate_padded_step,
)
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, scale_pixels
from shoal.core.model.kernels import use_vectorisable_attention
from shoal.engines.batched.graph import StepFunction
from shoal.engines.batched.hyperparams import substitute_hyperparams
from shoal.engines.batched.stack import DeviceStack


def build_step(stack: DeviceStack, padded: bool) -> StepFunction:
    """The step of a stack; its inputs begin with the data set, the rows, and where `padded` weights and live flags.

    Frozen tensors come in between, after the data set: one copy for all devices, outside of vmap.
    """
    setup, hyperparams, width, batch = stack.setup, stack.hyperparams, stack.width, stack.batch
    first = stack.slots[0]
    state, draws, own_fixed = first.training.state, first.first_draws, len(tree.collect_tensors(first.fixed))
    sample_tree = first.training.device.samples.inputs
    input_count = len(tree.collect_tensors(sample_tree))
    drawn_by_parts, images = len(tree.collect_tensors(draws)), setup.augment.count if setup.augment else 0

    def step_one_device(
        carried: Sequence[Tensor], fixed: Sequence[Tensor], x: Sequence[Tensor], y: Tensor, rest: Sequence[Tensor]
    ):
        inputs: Inputs = tree.refill_tensors(sample_tree, x)
        before: LocalState = tree.refill_tensors(state, carried)
        anchor, got, numbers, mask = tree.refill_tensors(first.fixed, fixed[:own_fixed])
        weight, live = (rest[0], rest[1]) if padded else (None, None)
        now, epoch, *drawn = rest[2:] if padded else rest
        parts = tree.refill_tensors(draws, drawn[:drawn_by_parts])
        context = StepContext(anchor, got, numbers | {"step": now, "epoch": epoch}, parts, mask)
        if setup.augment:
            inputs = setup.augment.transform_images(inputs, drawn[drawn_by_parts : drawn_by_parts + images])
        layers = iter(drawn[drawn_by_parts + images :])
        rule = substitute_hyperparams(setup, hyperparams, fixed[own_fixed:])
        gradient = compute_autograd_gradient if stack.uses_autograd else compute_func_gradient
        with override_layers(setup.net.has_dropout, setup.net.mixes_batch, lambda _: next(layers), weight):
            after, scored = advance(rule, before, Batch(inputs, ((y, None),), weight), context, gradient)
        if live is None:
            return tree.collect_tensors(after), scored.loss
        return tree.collect_tensors(gate_padded_step(live, after, before)), torch.where(live, scored.loss, 0)

    def step_all_devices(carried: list[Tensor], fixed: list[Tensor], frame: list[Tensor]):
        inputs, (targets, rows, *rest) = frame[:input_count], frame[input_count:]
        if stack.is_single:
            return step_one_device(
                carried,
                fixed,
                [stack.apply_memory_format(scale_pixels(t.index_select(0, rows))) for t in inputs],
                targets.index_select(0, rows),
                rest,
            )
        flat = rows.flatten()
        x = [scale_pixels(t.index_select(0, flat)).view(width, batch, *t.shape[1:]) for t in inputs]
        y = targets.index_select(0, flat).view(width, batch, *targets.shape[1:])
        with use_vectorisable_attention(setup.net.place):
            return torch.vmap(step_one_device)(carried, fixed, x, y, rest)

    def step_with_frozen(carried: list[Tensor], fixed: list[Tensor], frame: list[Tensor]):
        end = len(stack.data)
        start = end - len(setup.net.frozen)
        with setup.net.substitute_frozen(frame[start:end]):
            return step_all_devices(carried, fixed, [*frame[:start], *frame[end:]])

    return step_with_frozen if setup.net.frozen else step_all_devices
