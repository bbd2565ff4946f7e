"""FedBN: batch norm stays on its device, with its statistics (Li et al. 2021, arXiv:2102.07623)."""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.model.net import Net
from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.core.types import Round
from shoal.parts.lib.layer_roles import keep_on_devices


@dataclass(frozen=True)
class FedBN(Part):
    """Scale, shift and running statistics of every batch norm are each device's own; the rest is shared.

    With `statistics` the running statistics alone stay (SiloBN), and scale and shift are shared.
    """

    cite: ClassVar = ("li2021fedbn",)
    keeps_layers: ClassVar = "norms"

    statistics: bool = False

    def model(self, net: Net) -> Net:
        layers = tuple(f"{name}." for name, m in net.module.named_modules() if isinstance(m, _BatchNorm))
        names = [n for n in net.initial if n.startswith(layers) and not (self.statistics and n in net.trainable)]
        return keep_on_devices(net, names, self.name()) if names else net

    def init_server(self, round: Round) -> Tree:
        if not any(isinstance(m, _BatchNorm) for m in round.net.module.modules()):
            round.log("The model has no batch norm, so that nothing stays on devices: this is FedAvg.")
        return {}
