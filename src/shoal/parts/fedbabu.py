"""FedBABU: the head stays at its random start, the body is learnt, then devices fine-tune (Oh et al. 2022)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.types import Local, Work
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import fill_masks, find_last_layers, keep_on_devices


@dataclass(frozen=True)
class FedBABU(Part):
    """The last layer stays at its common start while the body learns; a device trains all of it before it uses it.

    `epochs` is how long a device fine-tunes its copy, of which nothing is kept. `layers` is how many of the last layers
    are the head.
    """

    cite: ClassVar = ("oh2022fedbabu",)
    keeps_layers: ClassVar = "head"

    epochs: int = 5
    layers: int = 1

    def __post_init__(self):
        require(self, "epochs >= 1 and layers >= 1", self.epochs >= 1 and self.layers >= 1)

    def model(self, net: Net) -> Net:
        return keep_on_devices(net, find_last_layers(net, self.layers, self.name()), self.name())

    def mask(self, local: Local) -> Params:
        return fill_masks(local.anchor, find_last_layers(local.net, self.layers, self.name()), 0.0)

    def finetune(self, work: Work) -> Work:
        return replace(work, epochs=float(self.epochs), steps=0)
