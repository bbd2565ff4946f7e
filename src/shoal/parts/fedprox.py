"""FedProx: stay near the model you received (Li et al. 2020, arXiv:1812.06127)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.tree import Params
from shoal.core.part import Neutral, Part
from shoal.core.types import Local
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedProx(Part):
    """Adds mu/2 |w - anchor|^2 to the local loss, which keeps a device near the model that it received."""

    cite: ClassVar = ("li2020fedprox",)
    neutral: ClassVar = Neutral({"mu": 0.0})

    mu: float = 0.01

    def __post_init__(self):
        require(self, "mu >= 0", self.mu >= 0)

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_proximal(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            apart = sum((p - local.anchor[k]).square().sum() for k, p in params.items())
            return scored._replace(loss=scored.loss + self.mu / 2 * apart)

        return score_proximal
