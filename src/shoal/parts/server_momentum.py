"""Server momentum: the mean update is a gradient that a heavy ball follows (Hsu et al. 2019, arXiv:1909.06335)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core import tree
from shoal.core.part import Neutral, Part
from shoal.core.tree import Params, Tree
from shoal.core.types import Round
from shoal.parts.checks import require


@dataclass(frozen=True)
class FedAvgM(Part):
    """m = beta m + (anchor - mean); w = anchor - lr m."""

    neutral: ClassVar = Neutral({"beta": 0.0, "lr": 1.0})

    beta: float = 0.9
    lr: float = 1.0

    def __post_init__(self):
        require(self, "0 <= beta < 1 and lr > 0", 0 <= self.beta < 1 and self.lr > 0)

    def init_server(self, round: Round) -> Tree:
        return {"m": tree.zeros(tree.only(round.anchor, round.net.common))}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        m = {k: self.beta * m + (round.anchor[k] - params[k]) for k, m in state["m"].items()}
        return params | {k: round.anchor[k] - self.lr * m for k, m in m.items()}, {"m": m}
