"""Scores of units (filters, heads, neurons): the rank of their feature maps, or the size of their weights."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shoal.core.extras import Extra
from shoal.core.model.feature_maps import TrackPoolingInputs
from shoal.core.model.inputs import Inputs
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Plan
from shoal.core.model.tree import Params
from shoal.parts.lib.submodel_units import compute_unit_strengths

ABOUT_SCORES = "the rank of each filter's maps, or the weight of each neuron"
UNIT_SCORES = Extra("axes", "float32", low=0, when="scores", about=ABOUT_SCORES)
"""The scores of its units that a device reports where `scores` is requested."""


@torch.no_grad()
def score_neurons(net: Net, params: Params, inputs: Inputs) -> dict[str, Tensor]:
    """By axis, the score r^i of each unit.

    Where units have maps (filters, heads): the mean rank of a unit's map over the inputs, as a share of the largest
    that it could have (HRank, Lin et al. 2020). A map is what the next layer reads, before pooling. Else the sum of the
    absolute weights that make the unit, as a multiple of the mean over its axis: a signed sum, as FedAD prints it,
    could cancel.
    """
    taps = tuple(dict.fromkeys(axis.tap for axis in net.axes if axis.tap))
    with TrackPoolingInputs():
        seen = net.forward(params, inputs, taps)[2] if taps else {}
    sizes = {name: own / own.mean().clamp(min=1e-12) for name, own in compute_unit_strengths(net, params).items()}
    return {
        a.name: compute_map_ranks(shape_feature_maps(seen[a.tap], a)) if a.tap else sizes[a.name].float().to(net.place)
        for a in net.axes
    }


def shape_feature_maps(output: Tensor, axis: Axis) -> Tensor:
    """A layer's output as samples x units x rows x columns: maps of filters, or positions of concatenated heads.

    Signals have one row; of volumes the slices stand below each other.
    """
    if any(cut.span > 1 and not cut.reads for cut in axis.cuts):
        return output.unflatten(-1, (axis.size, -1)).transpose(1, 2)
    return output.unsqueeze(2) if output.dim() == 3 else output.flatten(2, -2)


def compute_map_ranks(maps: Tensor) -> Tensor:
    """The mean rank of each unit's maps as a share of the largest possible one; values that are not finite are 0."""
    return average_map_ranks(maps) / min(maps.shape[-2:])


def average_map_ranks(maps: Tensor) -> Tensor:
    """The mean rank of each unit's maps; values that are not finite are 0."""
    maps = maps.float().nan_to_num(0.0, 0.0, 0.0)
    # many small decompositions are quicker on the CPU than on a GPU
    return torch.linalg.matrix_rank(maps.cpu()).float().mean(0).to(maps.device)


@torch.no_grad()
def measure_map_ranks(net: Net, params: Params, inputs: Inputs) -> dict[str, Tensor]:
    """By axis, the mean rank of each unit's maps over the inputs; 0 where units have no maps."""
    taps = tuple(dict.fromkeys(axis.tap for axis in net.axes if axis.tap))
    with TrackPoolingInputs():
        seen = net.forward(params, inputs, taps)[2] if taps else {}
    return {
        a.name: average_map_ranks(shape_feature_maps(seen[a.tap], a)) if a.tap else torch.zeros(a.size).to(net.place)
        for a in net.axes
    }


def sum_adjacent_weights(axes: Iterable[Axis], params: Params) -> dict[str, Tensor]:
    """By axis, the sum of the absolute weights that make each unit and of those that read it; biases do not count."""
    sums = {}
    for axis in axes:
        total = torch.zeros(axis.size, dtype=torch.float64)
        for cut in axis.cuts:
            if cut.tensor in params and params[cut.tensor].dim() > 1:
                line = params[cut.tensor].abs().double().movedim(cut.dim, 0).flatten(1).sum(1)
                total = total + line.view(cut.copies, axis.size, cut.span).sum((0, 2)).cpu()
        sums[axis.name] = total
    return sums


def average_neuron_scores(
    reports: list[tuple[int, dict[str, Tensor], Plan]], old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """R = sum n_k R_k / sum n_k over the devices that held a unit; a unit that no device held keeps its old score.

    `reports` are n_k, R_k and the plan of each device.
    """
    total = {axis: torch.zeros_like(own) for axis, own in reports[0][1].items()}
    mass = {axis: torch.zeros_like(own) for axis, own in total.items()}
    for size, own, plan in reports:
        for axis, value in own.items():
            units = plan.kept.get(axis, torch.arange(len(value))).to(value.device)
            total[axis].index_add_(0, units, value[units], alpha=size)
            mass[axis].index_add_(0, units, torch.full_like(value[units], size))
    base = {axis: old.get(axis, torch.zeros_like(own)) for axis, own in total.items()}
    return {
        axis: torch.where(mass[axis] > 0, own / mass[axis].clamp(min=1e-12), base[axis]) for axis, own in total.items()
    }
