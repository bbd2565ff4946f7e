"""One local step of a stack of devices as a function of flat lists of tensors, ready to be traced."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.step import LocalState, StepContext, advance, compute_func_gradient, gate_padded_step
from shoal.core.model import tree
from shoal.core.types import Batch
from shoal.engines.batched.graph import StepFunction
from shoal.engines.batched.hyperparams import substitute_hyperparams
from shoal.engines.batched.stack import DeviceStack


def build_step(cohort: DeviceStack, padded: bool) -> StepFunction:
    """The step of a stack; its inputs begin with the data set, the rows, and where `padded` weights and live flags."""
    site, knobs, width, batch = cohort.site, cohort.knobs, cohort.width, cohort.batch
    first = cohort.members[0]
    course, draws, own_fixed = first.visit.state, first.first, len(tree.collect_tensors(first.fixed))
    drawn_by_parts, images = len(tree.collect_tensors(draws)), site.augment.count if site.augment else 0

    def step_one_device(
        carried: Sequence[Tensor], fixed: Sequence[Tensor], x: Tensor, y: Tensor, rest: Sequence[Tensor]
    ):
        before: LocalState = tree.refill_tensors(course, carried)
        anchor, got, numbers, mask = tree.refill_tensors(first.fixed, fixed[:own_fixed])
        weight, live = (rest[0], rest[1]) if padded else (None, None)
        now, epoch, *drawn = rest[2:] if padded else rest
        parts = tree.refill_tensors(draws, drawn[:drawn_by_parts])
        scene = StepContext(anchor, got, numbers | {"step": now, "epoch": epoch}, parts, mask)
        if site.augment:
            x = site.augment.transform_images(x, drawn[drawn_by_parts : drawn_by_parts + images])
        layers = iter(drawn[drawn_by_parts + images :])
        rule = substitute_hyperparams(site, knobs, fixed[own_fixed:])
        with override_layers(site.net.has_dropout, site.net.mixes_batch, lambda _: next(layers), weight):
            after, scored = advance(rule, before, Batch(x, ((y, None),), weight), scene, compute_func_gradient)
        if live is None:
            return tree.collect_tensors(after), scored.loss
        return tree.collect_tensors(gate_padded_step(live, after, before)), torch.where(live, scored.loss, 0)

    def step_all_devices(carried: list[Tensor], fixed: list[Tensor], frame: list[Tensor]):
        inputs, targets, rows, *rest = frame
        if cohort.is_single:
            return step_one_device(
                carried,
                fixed,
                cohort.apply_memory_format(inputs.index_select(0, rows)),
                targets.index_select(0, rows),
                rest,
            )
        flat = rows.flatten()
        x = inputs.index_select(0, flat).view(width, batch, *inputs.shape[1:])
        y = targets.index_select(0, flat).view(width, batch, *targets.shape[1:])
        return torch.vmap(step_one_device)(carried, fixed, x, y, rest)

    return step_all_devices
