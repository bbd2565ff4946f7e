"""Momentum on devices that starts anew in every round, so that nothing of it travels (FedDUM; Liu et al. 2024)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import BatchScore
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class DeviceM(Part):
    """Devices take momentum steps along m = beta m + (1 - beta) g, with m = 0 at the start of every round.

    This is formula (11) of FedDUM; `beta` is its beta'. Because old and new gradients are averaged, a step has the
    length of a plain one.
    """

    cite: ClassVar = ("liu2024feddumap",)
    neutral: ClassVar = Neutral({"beta": 0.0})

    beta: float = 0.5

    def __post_init__(self):
        require(self, "0 <= beta < 1", 0 <= self.beta < 1)

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"m": tree.make_zeros(tree.select_params(params, device.net.trainable))}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        m = {k: self.beta * m + (1 - self.beta) * update[k] for k, m in state["m"].items()}
        return update | m, {"m": m}
