"""Adaptive federated dropout: a device keeps the sub-model that helped it (Bouacida et al. 2020, arXiv:2011.04050)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral
from shoal.core.streams import part_stream_name
from shoal.core.types import Round
from shoal.parts.lib.checks import require, require_axes
from shoal.parts.lib.mean_loss import ReportsMeanLoss
from shoal.parts.lib.submodel_units import ROW_KINDS, count_units_left, device_state_key, draw_units, list_axes_to_drop


@dataclass(frozen=True)
class AFD(ReportsMeanLoss):
    """Each device trains a sub-model of its own, and keeps it as long as its loss falls.

    Its units are scored by how much the loss fell with them, (l_before - l) / l_before; when it did not fall, the units
    are drawn anew by their scores. The server keeps the scores of every device.

    `rate` is the share of units dropped. Filters and attention heads stay where `filters` is False; units of recurrent
    layers always do. `rows` names kinds of rows that are dropped instead, of a language model: "output,input" is what
    FedBIAD compares itself with.
    """

    cite: ClassVar = ("bouacida2020afd",)
    reads: ClassVar = frozenset({"extras"})
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"rate": 0.0})

    rate: float = 0.25
    filters: bool = True
    rows: str = ""

    def __post_init__(self):
        require(self, "0 <= rate < 1", 0 <= self.rate < 1)
        require(self, f"rows among {', '.join(ROW_KINDS)}", not self.rows or {*self.rows.split(",")} <= {*ROW_KINDS})

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, self.list_dropped_axes(round.net), "" if self.filters else "filters=True")
        return {}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        known = {d: state.get(device_state_key(d), {"scores": self.make_zero_scores(round.net)}) for d in plans}
        masks = {d: self.choose_units(known[d], round, d) for d in plans}
        kept = {d: {axis: mask.nonzero().flatten() for axis, mask in masks[d].items()} for d in plans}
        state = state | {device_state_key(d): own | {"kept": masks[d]} for d, own in known.items()}
        return {d: replace(p, kept=kept[d]) for d, p in plans.items()}, state

    def choose_units(self, known: Tree, round: Round, device: int) -> dict[str, Tensor]:
        """By axis, which units a device trains in this round."""
        counts = {a.name: count_units_left(a.size, self.rate) for a in self.list_dropped_axes(round.net)}
        if known.get("fell") and all(int(known["kept"][name].sum()) == n for name, n in counts.items()):
            return known["kept"]
        draw = round.streams.make_numpy_generator(part_stream_name(self.name()), round.number, device)
        scores: dict[str, Tensor] = known["scores"]
        return {
            name: torch.zeros(len(own), dtype=torch.bool).index_fill(
                0, draw_units(draw, len(own), counts[name], compute_unit_chances(own)), True
            )
            for name, own in scores.items()
        }

    def list_dropped_axes(self, net: Net) -> list[Axis]:
        """The axes whose units may be dropped."""
        return list_axes_to_drop(net, self.filters, self.rows)

    def make_zero_scores(self, net: Net) -> dict[str, Tensor]:
        """Scores before anything is known."""
        return {a.name: torch.zeros(a.size) for a in self.list_dropped_axes(net)}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        updates = {}
        for reply in round.replies:
            known, loss = state[device_state_key(reply.device)], float(reply.report[self.name()]["loss"])
            before = known.get("loss", loss)
            # 1e-12: a loss of 0 cannot fall in proportion
            gain = (before - loss) / max(abs(before), 1e-12)
            scores, kept = known["scores"], known["kept"]
            if gain > 0:
                scores = {name: torch.where(kept[name], gain, own) for name, own in scores.items()}
            updates[device_state_key(reply.device)] = known | {"scores": scores, "loss": loss, "fell": gain > 0}
        return params, state | updates


def compute_unit_chances(scores: Tensor) -> np.ndarray:
    """The chance of each unit; one without a score yet counts as the mean of those that have one."""
    known = scores[scores > 0]
    weights = torch.where(scores > 0, scores, known.mean() if len(known) else 1.0).double()
    return (weights / weights.sum()).numpy()
