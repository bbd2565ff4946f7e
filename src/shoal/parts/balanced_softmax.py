"""Balanced softmax: no class is favoured for being frequent on a device (Ren et al. 2020, arXiv:2007.10740)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.class_priors import compute_log_prior


@dataclass(frozen=True)
class BalancedSoftmax(Part):
    """Cross-entropy of the logits + strength * log(n_c / n), so that no class is favoured for being frequent.

    n_c is the number of the device's n labels that are of class c. `strength` 0 is the plain cross-entropy.
    """

    cite: ClassVar = ("ren2020balanced",)
    needs_class_logits: ClassVar = True
    replaces_loss: ClassVar = True
    neutral: ClassVar = Neutral({"strength": 0.0})

    strength: float = 1.0

    def __post_init__(self):
        require(self, "strength >= 0", self.strength >= 0)

    @classmethod
    def name(cls) -> str:
        return "balanced_softmax"

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"prior": compute_log_prior(device)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_balanced(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            return scored._replace(
                loss=local.net.task.compute_mean_loss(scored.logits + self.strength * local.state["prior"], batch)
            )

        return score_balanced
