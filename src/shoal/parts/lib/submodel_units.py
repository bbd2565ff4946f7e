"""Units of a model's axes: how many a sub-model keeps, which ones, and how strong each is."""

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import ceil

import numpy as np
import torch
from torch import Tensor

from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.streams import RandomStreams, part_stream_name
from shoal.core.types import SERVER


def device_state_key(device: int) -> str:
    """The name of what a state keeps about a device; no axis is called so, and states by axis are cut when pruned."""
    return f"device {device}"


@lru_cache(256)
def parse_levels(text: str) -> tuple[float, ...]:
    """The numbers of a text such as "0.2,0.4,1" in rising order; none where it holds anything else or one twice."""
    try:
        levels = tuple(sorted(float(word) for word in text.split(",")))
    except ValueError:
        return ()
    return levels if len(set(levels)) == len(levels) else ()


def count_units_at_width(size: int, width: float) -> int:
    """How many of `size` units a model of that width has: rounded up, and at least one."""
    return max(1, ceil(width * size - 1e-9))


def count_units_left(size: int, rate: float) -> int:
    """How many of `size` units are left when that share of them is dropped: at least one."""
    return max(1, size - round(rate * size))


def take_first_units(net: Net, width: float) -> dict[str, Tensor]:
    """By axis, the first units of a model of that width."""
    return {axis.name: torch.arange(count_units_at_width(axis.size, width)) for axis in net.axes}


def draw_units(draw: np.random.Generator, size: int, count: int, chances: np.ndarray | None = None) -> Tensor:
    """`count` different units out of `size`, in rising order; equally likely, or with `chances`."""
    return torch.from_numpy(np.sort(draw.choice(size, count, replace=False, p=chances)))


@lru_cache(65536)
def draw_tier(streams: RandomStreams, part: str, device: int, levels: tuple[float, ...]) -> float:
    """The level that a device has for the whole run, equally likely each; the server has the largest.

    Server and device can both draw it, so that it does not travel.
    """
    if device == SERVER:
        return max(levels)
    return levels[int(streams.make_numpy_generator(part_stream_name(part, "tier"), 0, device).integers(len(levels)))]


ROW_KINDS = ("embedding", "output", "recurrent", "cells", "input")


def list_rows_of_kinds(net: Net, kinds: Collection[str]) -> list[Axis]:
    """The groups of rows whose kind is among these; ROW_KINDS lists the kinds."""
    return [rows for rows in net.rows if rows.name.rpartition(":")[2] in kinds]


def list_axes_to_drop(net: Net, filters: bool, rows: str) -> list[Axis]:
    """The axes whose units may be dropped: rows of the kinds named, or units of all layers that are not recurrent."""
    if rows:
        return list_rows_of_kinds(net, rows.split(","))
    return [a for a in net.axes if not is_recurrent(a) and (filters or not a.tap)]


def is_recurrent(axis: Axis) -> bool:
    """Whether a layer reads its own units, as an LSTM does at the next position."""
    own_tensors = {cut.tensor for cut in axis.cuts if not cut.reads}
    return any(cut.reads and cut.tensor in own_tensors for cut in axis.cuts)


def is_batch_normalised(net: Net, axis: Axis) -> bool:
    """Whether the units of an axis go through a batch normalisation, which keeps running statistics of each."""
    statistics = {name for name, _ in net.module.named_buffers()}
    return any(cut.tensor in statistics for cut in axis.cuts)


def compute_unit_strengths(net: Net, params: Mapping[str, Tensor], biases: bool = True) -> dict[str, Tensor]:
    """By axis, the sum of the absolute values of the parameters that make each unit.

    Without `biases` those of its weights alone: no bias, and no factor of a norm.
    """
    strengths = {}
    for axis in net.axes:
        total = torch.zeros(axis.size, dtype=torch.float64)
        for cut in axis.cuts:
            if not cut.reads and cut.tensor in net.trainable and (biases or params[cut.tensor].dim() > 1):
                value = params[cut.tensor].abs().double()
                line = value.movedim(cut.dim, 0).flatten(1).sum(1) if value.dim() > 1 else value
                total = total + line.view(cut.copies, axis.size, cut.span).sum((0, 2)).cpu()
        strengths[axis.name] = total
    return strengths
