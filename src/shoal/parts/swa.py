"""SWA: the model that is judged is the mean of the models since a round (Caldarola et al. 2022, arXiv:2203.11834)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.float_tensors import select_float_tensors


@dataclass(frozen=True)
class SWA(Part):
    """Judges the plain mean of the models from one round on; before it, the model itself.

    `start` is the number of the first round that counts (rounds count from 0; the paper takes three quarters of all
    rounds), and `every` says that of the rounds since then only each such one counts. Training goes on from the
    ordinary model and does not notice; nothing travels.
    """

    cite: ClassVar = ("caldarola2022flat", "izmailov2018swa")
    neutral: ClassVar = Neutral({"start": 1_000_000})

    start: int = 0
    every: int = 1

    def __post_init__(self):
        require(self, "start >= 0 and every >= 1", self.start >= 0 and self.every >= 1)

    def init_server(self, round: Round) -> Tree:
        return {"mean": {}, "count": 0}

    def observe(self, judged: Params, state: Tree, round: Round) -> Tree:
        since = round.number - self.start
        if since < 0 or since % self.every:
            return state
        models, mean, count = select_float_tensors(judged), state["mean"], state["count"] + 1
        mean = {k: torch.lerp(mean[k], v, 1 / count) for k, v in models.items()} if mean else models
        return {"mean": mean, "count": count}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return judged | {"": judged[""] | state["mean"]}
