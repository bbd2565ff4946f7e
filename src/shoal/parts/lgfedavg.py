"""LG-FedAvg: a body for each device, only the last layers are shared (Liang et al. 2020, arXiv:2001.01523)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import find_last_layers, keep_on_devices


@dataclass(frozen=True)
class LGFedAvg(Part):
    """All but the last layers are each device's own and never travel; all layers are trained together.

    `layers` is how many of the last layers are shared.
    """

    cite: ClassVar = ("liang2020lgfedavg",)
    keeps_layers: ClassVar = "body"

    layers: int = 1

    def __post_init__(self):
        require(self, "layers >= 1", self.layers >= 1)

    def model(self, net: Net) -> Net:
        shared = find_last_layers(net, self.layers, self.name())
        own = [name for name in net.names_with_role("shared") if name not in shared]
        return keep_on_devices(net, own, self.name())
