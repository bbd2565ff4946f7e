"""Federated Dropout: every device trains a random part of the units (Caldas et al. 2018, arXiv:1812.07210)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.streams import part_stream_name
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require, require_axes
from shoal.parts.lib.submodel_units import ROW_KINDS, count_units_left, draw_units, list_axes_to_drop


@dataclass(frozen=True)
class FedDrop(Part):
    """Every device trains a random part of the neurons, another one in every round.

    `rate` is the share dropped. The outputs of kept units are multiplied by their axis's size over the number kept.
    Filters and attention heads are dropped as well if `filters` says so; units of recurrent layers never are. `rows`
    names kinds of rows that are dropped instead, of a language model: "output" is what FedBIAD compares itself with.
    """

    cite: ClassVar = ("caldas2018feddrop",)
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"rate": 0.0})

    rate: float = 0.5
    filters: bool = False
    rows: str = ""

    def __post_init__(self):
        require(self, "0 <= rate < 1", 0 <= self.rate < 1)
        require(self, f"rows among {', '.join(ROW_KINDS)}", not self.rows or {*self.rows.split(",")} <= {*ROW_KINDS})

    def list_dropped_axes(self, net: Net) -> list[Axis]:
        """The axes whose units are dropped."""
        return list_axes_to_drop(net, self.filters, self.rows)

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, self.list_dropped_axes(round.net), "" if self.filters else "filters=True")
        return {}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        axes = self.list_dropped_axes(round.net)

        def draw_kept_axes(device: int) -> dict[str, Tensor]:
            draw = round.streams.make_numpy_generator(part_stream_name(self.name()), round.number, device)
            return {a.name: draw_units(draw, a.size, count_units_left(a.size, self.rate)) for a in axes}

        return {d: replace(p, kept=draw_kept_axes(d)) for d, p in plans.items()}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        net, kept = device.net, device.plan.kept
        counts = {a.name: len(kept[a.name]) if a.name in kept else a.size for a in self.list_dropped_axes(net)}
        like = torch.empty(0, dtype=net.dtype, device=net.place)
        return params, {a.name: like.new_full((a.size,), a.size / counts[a.name]) for a in self.list_dropped_axes(net)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_scaled(params: Params, batch: Batch) -> BatchScore:
            return inner(local.net.slicer.scale_unit_outputs(params, local.state), batch)

        return score_scaled
