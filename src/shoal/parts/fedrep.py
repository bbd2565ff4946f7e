"""FedRep: first the device's own head learns, then the shared body (Collins et al. 2021, arXiv:2102.07078)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.model.heads import list_side_tensors
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.types import Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.layer_roles import fill_masks, find_last_layers, keep_on_devices


@dataclass(frozen=True)
class FedRep(Part):
    """The last layer is each device's own: the first local steps of a round train it alone, the others the body.

    `head_share` is the share of local steps that train the head: 10 epochs of 11 are 10/11. `layers` is how many of the
    last layers are the head.
    """

    cite: ClassVar = ("collins2021fedrep",)
    keeps_layers: ClassVar = "head"

    head_share: float = 0.5
    layers: int = 1

    def __post_init__(self):
        require(self, "head_share from 0 to 1 and layers >= 1", 0 <= self.head_share <= 1 and self.layers >= 1)

    def model(self, net: Net) -> Net:
        return keep_on_devices(net, find_last_layers(net, self.layers, self.name()), self.name())

    def mask(self, local: Local) -> Params:
        numbers, net = local.numbers, local.net
        head_turn = (numbers["step"] + 0.5 < self.head_share * numbers["steps"]).to(net.dtype)
        head = find_last_layers(net, self.layers, self.name())
        body = [name for name in net.trainable if name not in (*head, *list_side_tensors(net))]
        return fill_masks(local.anchor, head, head_turn) | fill_masks(local.anchor, body, 1 - head_turn)
