"""FedCM: every local step mixes in the mean step of the last round (Xu et al. 2021, arXiv:2106.10874)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import BatchScore
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Local, Round
from shoal.parts.lib.checks import require, require_no_momentum
from shoal.parts.lib.tensor_norms import compute_norm


@dataclass(frozen=True)
class FedCM(Part):
    """A local step goes along alpha g + (1 - alpha) m, where m is the mean local step of the last round.

    The server makes m = (anchor - mean) / (lr * steps), with the learning rate of the round and the mean number of
    local steps by the weights of the replies, and sends it beside the model. It is 0 in the first round.

    `alpha` is what a device's own gradient counts.
    """

    cite: ClassVar = ("xu2021fedcm",)
    assumes_sgd: ClassVar = True
    corrects_steps: ClassVar = True
    metrics: ClassVar = (Metric("m_norm", "norm of the momentum m", drawn=True, about="2-norm of m after the round"),)
    reads: ClassVar = frozenset({"outcomes"})
    neutral: ClassVar = Neutral({"alpha": 1.0})

    alpha: float = 0.1

    def __post_init__(self):
        require(self, "0 < alpha <= 1", 0 < self.alpha <= 1)

    def init_server(self, round: Round) -> Tree:
        require_no_momentum(self, round, "its own momentum m is made from plain steps")
        return {"m": tree.make_zeros(tree.select_params(round.anchor, round.net.shared_trainable))}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        return {d: {"m": state["m"]} for d in round.devices}, state

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        mixed = {k: self.alpha * update[k] + (1 - self.alpha) * m for k, m in local.got["m"].items()}
        return update | mixed, state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        sum_factors, weights = round.optimiser.schedule.sum_factors, round.weights.tolist()
        steps = sum(w * sum_factors(r.outcome.steps) for w, r in zip(weights, round.replies, strict=True))
        span, m = round.work.lr * steps, state["m"]
        if span > 0:
            m = {k: (round.anchor[k] - params[k]) / span for k in m}
        round.tell("m_norm", compute_norm(m))
        return params, {"m": m}
