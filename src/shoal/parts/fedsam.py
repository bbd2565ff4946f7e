"""FedSAM: devices seek flat minima by sharpness-aware steps (Qu et al. 2022, arXiv:2206.02618)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model.heads import list_side_tensors
from shoal.core.model.tree import Params
from shoal.core.part import Neutral, Part
from shoal.core.types import Local
from shoal.parts.lib.ascent import compute_shifted_gradient, make_adaptive_ascent_step, make_ascent_step
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedSAM(Part):
    """Local steps take the gradient at w + e, where e is rho long and goes uphill: e = rho g / (norm of g).

    Both gradients are of the same batch, so a step costs two passes. Statistics of batch norm and the loss that is told
    are those of the pass at w.

    `rho` is how far uphill, with one norm over all tensors. With `adaptive` (FedASAM) the step uphill is measured
    relative to the weights: e = rho T^2 g / (norm of T g), T being |w| + `eta` for tensors with "weight" in their names
    and 1 for others.
    """

    cite: ClassVar = ("qu2022fedsam", "caldarola2022fedasam")
    perturbs_gradient: ClassVar = True
    neutral: ClassVar = Neutral({"rho": 0.0})

    rho: float = 0.1
    adaptive: bool = False
    eta: float = 0.2

    def __post_init__(self):
        require(self, "rho >= 0 and eta >= 0", self.rho >= 0 and self.eta >= 0)

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        beside = list_side_tensors(local.net)

        def compute_uphill(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            slope, scored = inner(scorer, params, batch)
            if self.adaptive:
                ascent = make_adaptive_ascent_step(slope, params, self.rho, self.eta, beside)
            else:
                ascent = make_ascent_step(slope, self.rho, beside)
            return compute_shifted_gradient(inner, scorer, params, ascent, batch)[0], scored

        return compute_uphill
