"""FedProx: stay near the model you received (Li et al. 2020, arXiv:1812.06127)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Scorer
from shoal.core.part import Neutral, Part
from shoal.core.types import Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.proximal_term import add_proximal_term


@dataclass(frozen=True)
class FedProx(Part):
    """Adds mu/2 |w - anchor|^2 to the local loss, which keeps a device near the model that it received."""

    cite: ClassVar = ("li2020fedprox",)
    neutral: ClassVar = Neutral({"mu": 0.0})

    mu: float = 0.01

    def __post_init__(self):
        require(self, "mu >= 0", self.mu >= 0)

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        return add_proximal_term(inner, local.anchor, self.mu)
