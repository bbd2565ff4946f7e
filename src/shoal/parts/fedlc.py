"""FedLC: rare classes are held to a larger margin (Zhang et al. 2022, arXiv:2209.00189)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.class_priors import count_device_labels


@dataclass(frozen=True)
class FedLC(Part):
    """Cross-entropy of the logits - tau * n_c^(-1/4), which asks for a larger margin of rare classes.

    n_c is the number of the device's labels of class c. Where it has none, 100 tau is taken off.
    """

    cite: ClassVar = ("zhang2022fedlc",)
    needs_class_logits: ClassVar = True
    replaces_loss: ClassVar = True
    neutral: ClassVar = Neutral({"tau": 0.0})

    tau: float = 1.0

    def __post_init__(self):
        require(self, "tau >= 0", self.tau >= 0)

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        # (1e-8)^(-1/4) = 100 for a class without samples, finite as the formula is not
        return params, {"margin": count_device_labels(device, 1e-8).pow(-0.25).to(device.net.dtype)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_calibrated(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            return scored._replace(
                loss=local.net.task.compute_mean_loss(scored.logits - self.tau * local.state["margin"], batch)
            )

        return score_calibrated
