"""FedExP: the server steps further where updates disagree (Jhunjhunwala et al. 2023, arXiv:2301.09604)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.tensor_norms import compute_norm


@dataclass(frozen=True)
class FedExP(Part):
    """The server's step along the mean update is the longer, the more the updates of devices disagree.

    Its rate is max(1, sum p_k |delta_k|^2 / (2 (|mean delta|^2 + eps))), with the weights p_k of the replies. The model
    that is judged is the mean of the last two, since extrapolated models swing; after the first round it is the model
    itself. `eps` bounds the rate where the mean is small. It is to be seen against |mean delta|^2, which falls with
    the square of the learning rate.
    """

    cite: ClassVar = ("jhunjhunwala2023fedexp",)
    reads: ClassVar = frozenset({"updates"})
    neutral: ClassVar = Neutral({"eps": 1e12}, rounds=1)
    metrics: ClassVar = (Metric("eta_g", "learning rate of the server", drawn=True, compared=True),)

    eps: float = 0.001

    def __post_init__(self):
        require(self, "eps >= 0", self.eps >= 0)

    def init_server(self, round: Round) -> Tree:
        return {"before": {}, "moved": False}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        anchor = tree.select_params(round.anchor, round.net.shared_trainable)
        mean = {k: params[k] - old for k, old in anchor.items()}
        lengths = torch.stack([compute_norm(tree.select_params(r.delta, anchor)) for r in round.replies]).square()
        rate = (round.weights.to(lengths) @ lengths) / (2 * (compute_norm(mean).square() + self.eps))
        rate = rate.nan_to_num(1.0, 1.0).clamp(min=1.0)  # nobody moved: 0 / 0
        round.tell("eta_g", rate)
        moved = {k: old + rate.to(old.dtype) * mean[k] for k, old in anchor.items()}
        return params | moved, {"before": anchor if state["moved"] else {}, "moved": True}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        means = {k: (old + judged[""][k]) / 2 for k, old in state["before"].items()}
        return judged | {"": judged[""] | means}
