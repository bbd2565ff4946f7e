"""FedLESAM: the way the global model went since a device was last here stands for uphill (Fan et al. 2024)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.ascent import compute_shifted_gradient, make_ascent_step
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedLESAM(Part):
    """Local steps take the gradient at w + e, where e is rho long and goes back to the model received last time.

    e = rho (old - anchor) / (norm of old - anchor), the same in all steps of a round, where old is the model that the
    device received when it last took part. It is the global model's way uphill, and costs no second pass. It is 0 when
    a device takes part for the first time. `rho` is how far uphill, with one norm over all tensors.
    """

    cite: ClassVar = ("fan2024fedlesam",)
    perturbs_gradient: ClassVar = True
    needs_whole: ClassVar = True
    neutral: ClassVar = Neutral({"rho": 0.0})

    rho: float = 0.1

    def __post_init__(self):
        require(self, "rho >= 0", self.rho >= 0)

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        here = tree.select_params(device.anchor, device.net.shared_trainable)
        back = tree.subtract_params(memory.get("old") or here, here)
        return params, {"ascent": make_ascent_step(back, self.rho)}

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        def compute_uphill(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            return compute_shifted_gradient(inner, scorer, params, local.state["ascent"], batch)

        return compute_uphill

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"old": tree.select_params(device.anchor, device.net.shared_trainable)}
