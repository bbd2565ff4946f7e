"""Server momentum: the mean update is a gradient that a heavy ball follows (Hsu et al. 2019, arXiv:1909.06335)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require

STARTS = ("zero", "first")


@dataclass(frozen=True)
class FedAvgM(Part):
    """The server follows the mean update with momentum: m = beta m + (anchor - mean), w = anchor - lr m.

    With `ema` the new part counts 1 - beta, so that m is a running mean of changes (formula (8) of FedDUM). `start` is
    what m is in the first round: `zero`, or the `first` change itself, which spares a running mean a start that is too
    slow.
    """

    cite: ClassVar = ("hsu2019fedavgm",)
    neutral: ClassVar = Neutral({"beta": 0.0, "lr": 1.0})

    beta: float = 0.9
    lr: float = 1.0
    ema: bool = False
    start: str = "zero"

    def __post_init__(self):
        require(self, "0 <= beta < 1 and lr > 0", 0 <= self.beta < 1 and self.lr > 0)
        require(self, f"start in {STARTS}", self.start in STARTS)

    def init_server(self, round: Round) -> Tree:
        return {"m": tree.make_zeros(tree.select_params(round.anchor, round.net.shared_trainable)), "moved": False}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        change = {k: round.anchor[k] - params[k] for k in state["m"]}
        new = 1 - self.beta if self.ema else 1.0
        if self.start == "first" and not state["moved"]:
            m = change
        else:
            m = {k: self.beta * m + new * change[k] for k, m in state["m"].items()}
        return params | {k: round.anchor[k] - self.lr * m for k, m in m.items()}, {"m": m, "moved": True}
