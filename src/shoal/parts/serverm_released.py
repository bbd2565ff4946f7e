"""ServerM as released: an exponential mean of changes that moves the model again after the server's own step.

Released code of FedDUAP (PaddleFL, python/paddle_fl/mobile/fedDUAP, experiments/central.py), whose group compares
FedDUM with it. Two moves a round where the server trains, and one where it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.aggregate import average_replies
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Reply, Round
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class ServerMReleased(Part):
    """After averaging m = beta m + (1 - beta) (mean - anchor), w = anchor + m; once more for the server's own step.

    m starts as the first change. Parts listed before it that move the model on the server, such as FedDU, start from
    that w, and what they add goes through m again: m = beta m + (1 - beta) step, w = w + m. So w is anchor + (1 + beta)
    m + (1 - beta) step, with m as averaging left it. Where nobody moved the model there is no second time.
    """

    cite: ClassVar = ("liu2024feddumap",)
    reads: ClassVar = frozenset({"updates"})
    neutral: ClassVar = Neutral({"beta": 0.0})

    beta: float = 0.9

    def __post_init__(self):
        require(self, "0 <= beta < 1", 0 <= self.beta < 1)

    @classmethod
    def name(cls) -> str:
        return "serverm_released"

    def init_server(self, round: Round) -> Tree:
        return {"m": tree.make_zeros(tree.select_params(round.anchor, round.net.shared_trainable)), "moved": False}

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        mean = average_replies(round)
        m = {k: mean[k] - round.anchor[k] for k in state["m"]}
        m = self.average_momentum(state["m"], m) if state["moved"] else m
        return mean | {k: round.anchor[k] + own for k, own in m.items()}, {"m": m, "moved": True}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        base = {k: round.anchor[k] + own for k, own in state["m"].items()}
        step = {k: params[k] - own for k, own in base.items()}
        if not any(bool(torch.any(own != 0)) for own in step.values()):
            return params, state
        m = self.average_momentum(state["m"], step)
        return params | {k: base[k] + own for k, own in m.items()}, state | {"m": m}

    def average_momentum(self, m: Params, change: Params) -> Params:
        return {k: self.beta * own + (1 - self.beta) * change[k] for k, own in m.items()}
