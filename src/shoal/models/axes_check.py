"""Checks of axes: a copy of a module must compute the same whether units are cut out, masked, or made but not read."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.core.model.feature_maps import TrackPoolingInputs
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Plan

TRIAL_UNITS = 8
"""How many units of an axis are kept in a trial."""


class AxisError(Exception):
    """A width that no cuts describe."""


def draw_inputs(module: nn.Module, input_shape: tuple[int, ...], token_inputs: bool) -> Tensor:
    """Three random inputs of the module's own kind."""
    first = next(p for p in module.parameters() if p.is_floating_point())
    if token_inputs:
        words = min((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=2)
        return torch.randint(0, words, (3, *input_shape)).to(first.device)
    return torch.randn(3, *input_shape).to(first)


@torch.no_grad()
def build_trial(module: nn.Module, input_shape: tuple[int, ...], token_inputs: bool) -> tuple[Net, Tensor]:
    """A copy where no weight is 0 or equal to another, and inputs: in double precision and small if it takes those."""
    small = (input_shape[0], *(max(1, side // 4) for side in input_shape[1:])) if len(input_shape) == 3 else input_shape
    for kind in (torch.double, None):
        net = Net(perturb_weights(deepcopy(module).to(kind).eval()), input_shape, 0, token_inputs=token_inputs)
        for shape in (small, input_shape):
            x = draw_inputs(net.module, shape, token_inputs)
            try:
                if net.module(x).isfinite().all():
                    return net, x
            except Exception:  # it wants its own size, or makes numbers of its own precision
                continue
    raise AxisError


def perturb_weights(module: nn.Module) -> nn.Module:
    """The same module with all weights and statistics moved at random; variances only grow."""
    norms = (buffer for layer in module.modules() if isinstance(layer, _NormBase) for buffer in layer.buffers())
    for value in (*module.parameters(), *norms):
        if value.is_floating_point():
            noise = torch.rand(value.shape) if value.dim() < 2 else torch.randn(value.shape) * value[0].numel() ** -0.5
            value.data += 0.2 * noise.to(value)
    return module


def keep_lawful_axes(net: Net, x: Tensor, axes: list[Axis], kept: list[Axis]) -> list[Axis]:
    """`kept` and those of `axes` that pass the check together with them; one that fails is tried again interleaved."""
    if is_lawful(net, [*kept, *axes], x):
        return [*kept, *axes]
    if len(axes) > 1:
        half = len(axes) // 2
        return keep_lawful_axes(net, x, axes[half:], keep_lawful_axes(net, x, axes[:half], kept))
    turned = [interleave_units(axis) for axis in axes]
    return [*kept, *turned] if turned != axes and is_lawful(net, [*kept, *turned], x) else kept


def interleave_units(axis: Axis) -> Axis:
    """The same axis where flattening put the units next to each other, and not the numbers of each unit."""
    turned = (replace(cut, span=1, copies=cut.span) if cut.copies == 1 else cut for cut in axis.cuts)
    return replace(axis, cuts=tuple(turned))


@torch.no_grad()
def is_lawful(net: Net, axes: list[Axis], x: Tensor) -> bool:
    """Whether all axes can be cut at once, and once more in each of two halves of the thin module that this leaves."""
    try:
        thin = cut_at_random(replace(net, module=copy_module(net), axes=tuple(axes)), axes, x)
        for part in (thin.axes[::2], thin.axes[1::2]):
            cut_at_random(thin, part, x)
    except Exception:  # it is another function, or does not run
        return False
    return True


def cut_at_random(net: Net, axes: Iterable[Axis], x: Tensor) -> Net:
    """A module with a few random units of each axis; AxisError unless it computes what the masked module computes.

    Only BatchNorm is ever in training mode: what draws random numbers would draw others for another width.
    """
    kept = {a.name: torch.randperm(a.size)[: draw_unit_count(a.size)].sort().values for a in axes}
    cut, plan = net.slicer.take(net.initial, Plan(kept)), Plan(kept)
    small, masked = net.cut(plan), net.slicer.place(cut, net.initial, plan)
    sizes = {axis.name: axis.size for axis in axes}
    units = {k: torch.zeros(sizes[k], dtype=net.dtype).index_fill(0, v, 1).to(net.place) for k, v in kept.items()}
    unread = net.slicer.scale_unit_outputs(net.initial, units)
    for training in (False, True) if net.mixes_batch else (False,):
        for layer in (*net.module.modules(), *small.module.modules()):
            layer.training = training and isinstance(layer, _BatchNorm)
        expected = small.forward(cut, x)[0]
        near = float(expected.abs().max()) * (1e-9 if expected.dtype == torch.double else 1e-3)
        others = [net.forward(params, x)[0] for params in (masked, unread)]
        if not expected.isfinite().all() or not all(torch.allclose(other, expected, 0, near) for other in others):
            raise AxisError
    return small


@torch.no_grad()
def tap_feature_maps(net: Net, axes: list[Axis], x: Tensor) -> Iterator[Axis]:
    """The same axes with the layer where each unit has a map: the one that is read, else the one that makes it."""
    taps = {axis.name: (axis.tap, axis.name) for axis in axes if axis.tap}
    with TrackPoolingInputs():
        seen = net.forward(net.initial, x, tuple(tap for both in taps.values() for tap in both))[2]
    for axis in axes:
        mapped = [tap for tap in taps.get(axis.name, ()) if seen[tap].dim() > 2 and seen[tap].shape[1] == axis.size]
        yield replace(axis, tap=mapped[0] if mapped else "")


def draw_unit_count(size: int) -> int:
    """Some units but not all, if there are two, and more than one, if there are three."""
    least = max(1, min(2, size - 1))
    return int(torch.randint(least, max(least + 1, min(size, TRIAL_UNITS + 1)), ()))
