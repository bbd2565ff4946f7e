"""Which layers of a model stay on devices or are frozen: the last ones, all but these, or those of a kind."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.heads import SideTensors, find_head_layer
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.tree import Params


def find_last_layers(net: Net, count: int, part: str) -> tuple[str, ...]:
    """The names of the tensors of the last `count` layers that have any, the head being the very last."""
    head, _ = find_head_layer(net, part)
    beside = {name for name, layer in net.module.named_modules() if isinstance(layer, SideTensors)}
    layers = dict.fromkeys(owner for name in net.initial if (owner := name.rpartition(".")[0]) not in beside)
    chosen = [*(layer for layer in layers if layer != head), head][-count:]
    return tuple(name for name in net.initial if name.rpartition(".")[0] in chosen)


def keep_on_devices(net: Net, names: Collection[str], part: str) -> Net:
    """The net whose tensors of these names are personal; an error where nothing would be left to travel."""
    roles = dict(net.roles) | dict.fromkeys(names, "personal")
    if not any(roles.get(name, "shared") == "shared" for name in net.trainable):
        problem = f"{part} keeps every layer of this model on the devices, and nothing is left to share."
        raise ShoalError("bad-part", problem, "Use a model with more layers, or keep fewer of them.")
    return replace(net, module=copy_module(net), roles=roles)


def train_only(net: Net, names: Collection[str], part: str) -> Net:
    """The net of whose shared tensors only those of these names are trained and travel; the others are frozen."""
    frozen = (name for name in net.names_with_role("shared") if name not in names)
    made = replace(net, module=copy_module(net), roles=dict(net.roles) | dict.fromkeys(frozen, "frozen"))
    if not made.shared_trainable:
        problem = f"{part} freezes all of this model that would be shared, and nothing is left to train."
        raise ShoalError("bad-part", problem, "Leave it out, or leave out the part that keeps the other layers.")
    return made


def fill_masks(params: Params, names: Sequence[str], value: Tensor | float) -> Params:
    """For each of these tensors a mask with one value everywhere, which broadcasts over it."""
    return {name: params[name].new_ones(()) * value for name in names if name in params}
