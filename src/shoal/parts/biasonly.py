"""Bias-only training (BitFit): biases and the last layer move, nothing else does (Ben Zaken et al. 2022)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.parts.lib.layer_roles import find_last_layers, train_only


@dataclass(frozen=True)
class BiasOnly(Part):
    """Only biases, shifts of norms and the last layer are trained and travel, the rest is frozen.

    Without `head` the last layer has its bias trained alone, like the others.
    """

    cite: ClassVar = ("benzaken2022bitfit",)
    freezes_rest: ClassVar = True

    head: bool = True

    def model(self, net: Net) -> Net:
        last = find_last_layers(net, 1, self.name()) if self.head else ()
        biases = [name for name in net.trainable if is_bias(name) and net.roles.get(name, "shared") == "shared"]
        if not set(biases) - set(last):
            problem = "biasonly trains biases, and this model has none but its last layer's."
            raise ShoalError(
                "bad-part", problem, "Use lora or lastlayers, or a model whose layers have biases that are trained."
            )
        return train_only(net, {*biases, *last}, self.name())


def is_bias(name: str) -> bool:
    """Whether a tensor is added to what a layer makes, by its name: bias, in_proj_bias, bias_ih_l0."""
    key = name.rpartition(".")[2]
    return key == "bias" or key.endswith("_bias") or key.startswith("bias_")
