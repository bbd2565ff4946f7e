"""FedPer: the last layers stay on their device, the others are shared (Arivazhagan et al. 2019, arXiv:1912.00818)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import find_last_layers, keep_on_devices


@dataclass(frozen=True)
class FedPer(Part):
    """The last layers are each device's own and never travel; all layers are trained together.

    `layers` is how many of the last layers stay.
    """

    cite: ClassVar = ("arivazhagan2019fedper",)
    keeps_layers: ClassVar = "head"

    layers: int = 1

    def __post_init__(self):
        require(self, "layers >= 1", self.layers >= 1)

    def model(self, net: Net) -> Net:
        return keep_on_devices(net, find_last_layers(net, self.layers, self.name()), self.name())
