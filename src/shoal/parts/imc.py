"""IMC: one pruning of single weights, as deep as the curvature of the loss allows (Zhang et al., NeurIPS 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shoal.core.errors import ShoalError
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.streams import part_stream_name
from shoal.core.types import Round
from shoal.parts.lib.checks import require, require_curvature
from shoal.parts.lib.curvature import RULES, FlatLoss, estimate_pruning_rate
from shoal.parts.lib.submodel_units import count_units_left
from shoal.parts.lib.weight_masks import (
    apply_masks,
    init_mask_state,
    list_prunable_weights,
    mask_strongest_overall,
    note_known_masks,
    plan_masked_training,
    replace_masks,
)

MANY = 10**9


@dataclass(frozen=True)
class IMC(Part):
    """In one round the server prunes single weights, as many as the curvature of the loss allows.

    At the end of round `at` (the first round is 1) it finds, on its own samples, which share of the model can go, and
    the smallest weights of all layers together go. From then on devices train what is left.

    `rule` is how the share is found: `slq_plateau` and `eigen_gap` from the curvature on `images` samples, after
    `steps` Lanczos steps, and `fixed` is `rate`.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("zhang2021imc",)
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"rule": "fixed", "rate": 0.0})

    rule: str = "slq_plateau"
    rate: float = 0.378
    at: int = 30
    images: int = 100
    steps: int = 50

    def __post_init__(self):
        require(self, f"rule one of {', '.join(RULES)}", self.rule in RULES)
        require(self, "0 <= rate < 1", 0 <= self.rate < 1)
        counts = (self.at, self.images, self.steps)
        require(self, "at, images and steps from 1 up", all(0 < n < MANY for n in counts))

    def init_server(self, round: Round) -> Tree:
        if round.server is None and self.rule != "fixed":
            problem = f"{self} looks at samples of the server, and there are none."
            raise ShoalError("no-data", problem, "Give it some (--server-data share:0.05), or write rule='fixed'.")
        list_prunable_weights(self, round.net)
        if self.rule != "fixed":
            require_curvature(self, round.net)
        return init_mask_state({}, round) | {"done": False}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        return plan_masked_training(plans, state), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        state = note_known_masks(state, round)
        share = self.propose_rate(params, round) if round.number + 1 >= self.at and not state["done"] else None
        if share is not None:
            names = list_prunable_weights(self, round.net)
            count = count_units_left(sum(params[k].numel() for k in names), share)
            state = replace_masks(state, mask_strongest_overall(params, names, count)) | {"done": True}
        return apply_masks(params, state["masks"]), state

    def propose_rate(self, params: Params, round: Round) -> float | None:
        """How much of the model can go; None where its curvature says nothing."""
        if self.rule == "fixed":
            return self.rate
        assert round.server is not None
        loss = FlatLoss(round.net, params, round.server.take_batch(round.server.index[: self.images]))
        generator = round.streams.make_torch_generator(part_stream_name(self.name(), "probe"), round.number)
        return estimate_pruning_rate(self.rule, loss, round.net.initial, params, self.steps, generator)

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return {name: apply_masks(own, state["masks"]) for name, own in judged.items()}
