"""EMA: the model that is judged is a running mean of the models of all rounds (Polyak and Juditsky 1992)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.float_tensors import select_float_tensors


@dataclass(frozen=True)
class EMA(Part):
    """Judges an exponential moving average of the models: mean = beta mean + (1 - beta) w.

    It starts at the model of the first round. Training goes on from the ordinary model and does not notice; nothing
    travels. `beta` is what the old mean counts: with 0.9 the last ten models make two thirds of it. Listed behind a
    part that judges another model than it broadcasts (FedDyn, FedACG, FedExP), it averages what that part judges.
    """

    cite: ClassVar = ("polyak1992averaging",)
    neutral: ClassVar = Neutral({"beta": 0.0})

    beta: float = 0.9

    def __post_init__(self):
        require(self, "0 <= beta < 1", 0 <= self.beta < 1)

    def init_server(self, round: Round) -> Tree:
        return {"mean": {}}

    def observe(self, judged: Params, state: Tree, round: Round) -> Tree:
        models, mean = select_float_tensors(judged), state["mean"]
        # lerp leaves a mean of equal models as it is, to the last bit
        return {"mean": {k: torch.lerp(mean[k], v, 1 - self.beta) for k, v in models.items()} if mean else models}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return judged | {"": judged[""] | state["mean"]}
