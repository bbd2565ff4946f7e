"""Partial training: the last layers are trained and travel, the others stay as they are."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import find_last_layers, train_only


@dataclass(frozen=True)
class LastLayers(Part):
    """Only the last layers are trained and travel; all before them are frozen.

    `layers` is how many of the last layers that is.
    """

    cite: ClassVar = ()
    freezes_rest: ClassVar = True

    layers: int = 1

    def __post_init__(self):
        require(self, "layers >= 1", self.layers >= 1)

    def model(self, net: Net) -> Net:
        return train_only(net, find_last_layers(net, self.layers, self.name()), self.name())
