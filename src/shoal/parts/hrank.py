"""HRank: the same share of every layer's filters goes, those whose maps have the lowest rank (Lin et al. 2020)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.core.model.plan import Plan
from shoal.core.model.tree import Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require, require_axes, require_server
from shoal.parts.lib.filter_choice import choose_kept_filters, list_filter_axes
from shoal.parts.lib.unit_scores import score_neurons

MANY = 10**9


@dataclass(frozen=True)
class HRank(Part):
    """In one round the server prunes the same share of every layer: the filters whose maps have the lowest rank.

    That is round `at`, the first being 1, and `rate` the share. Ranks are means over `images` samples of the server.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("lin2020hrank",)
    neutral: ClassVar = Neutral({"rate": 0.0})

    rate: float = 0.4
    at: int = 30
    images: int = 500

    def __post_init__(self):
        require(self, "0 <= rate < 1", 0 <= self.rate < 1)
        require(self, "at and images from 1 up", 0 < self.at < MANY and 0 < self.images < MANY)

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, list_filter_axes(round.net))
        require_server(self, round, "looks at")
        return {"done": False}

    def prune(self, plan: Plan, state: Tree, round: Round) -> tuple[Plan, Tree]:
        if state["done"] or round.number + 1 < self.at or plan.kept:
            return plan, state
        assert round.server is not None
        inputs = round.server.take_batch(round.server.index[: self.images]).inputs
        ranks = score_neurons(round.net, round.params, inputs)
        rates = {axis.name: self.rate for axis in list_filter_axes(round.net)}
        kept = choose_kept_filters(round.net, round.params, ranks, rates)
        return replace(plan, kept=kept), {"done": True}
