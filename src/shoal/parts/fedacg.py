"""FedACG: devices start where the server's momentum is about to lead (Kim et al. 2024, arXiv:2201.03172)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Scorer
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Local, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.proximal_term import add_proximal_term
from shoal.parts.lib.tensor_norms import compute_norm


@dataclass(frozen=True)
class FedACG(Part):
    """Broadcasts v = w + lam m, the model moved ahead by its momentum, and pulls devices towards v.

    m = lam m + (mean - v), and w = mean is the model that is judged; the local loss gets beta/2 |w_k - v|^2. `lam` is
    the share of the momentum that stays, `beta` the strength of the pull.
    """

    cite: ClassVar = ("kim2024fedacg",)
    neutral: ClassVar = Neutral({"lam": 0.0, "beta": 0.0})
    metrics: ClassVar = (Metric("momentum", "length of the server's momentum", drawn=True),)

    lam: float = 0.85
    beta: float = 0.002

    def __post_init__(self):
        require(self, "0 <= lam < 1 and beta >= 0", 0 <= self.lam < 1 and self.beta >= 0)

    def init_server(self, round: Round) -> Tree:
        own = tree.select_params(round.anchor, round.net.shared_trainable)
        return {"m": tree.make_zeros(own), "mean": own}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        return add_proximal_term(inner, local.anchor, self.beta)

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        mean = tree.select_params(params, state["m"])
        m = {k: self.lam * m + (mean[k] - round.anchor[k]) for k, m in state["m"].items()}
        round.tell("momentum", compute_norm(m))
        return params | {k: v + self.lam * m[k] for k, v in mean.items()}, {"m": m, "mean": mean}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return judged | {"": judged[""] | state["mean"]}
