"""A copy of a net's module, and the correction of layer sizes (`in_features`, ...) after its tensors were cut."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from shoal.core.model.frozen import iterate_slots

if TYPE_CHECKING:
    from shoal.core.model.net import Net


def copy_module(net: "Net") -> nn.Module:
    """A copy of the net's module with its initial tensors and without hooks; frozen tensors are shared, not copied."""
    net.reset_slots()
    module = deepcopy(net.module, {id(tensor): tensor for tensor in net.frozen.values()})
    for layer in module.modules():
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
    set_module_tensors(module, {}, frozenset(net.trainable), net.ties)
    return module


def set_module_tensors(
    module: nn.Module, tensors: Mapping[str, Tensor], trainable: Collection[str], ties: Mapping[str, str]
) -> None:
    """Put tensors into a module, and make those in its parameter slots parameters; tied slots get one and the same."""
    parameters: dict[str, Tensor] = {}
    parameter_holders = {id(layer._parameters) for layer in module.modules()}
    for slot in list(iterate_slots(module)):
        name = ties.get(slot.name, slot.name)
        value = tensors.get(name, slot.tensor)
        if id(slot.holder) not in parameter_holders:
            slot.holder[slot.key] = value
            continue
        if name not in parameters:
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad and name not in trainable
            parameters[name] = value if frozen else nn.Parameter(value.detach(), name in trainable)
        slot.holder[slot.key] = parameters[name]


def update_layer_sizes(layer: nn.Module) -> None:
    """Set the size attributes of a layer to the shapes of its tensors, after they were cut."""
    match layer:
        case nn.Linear():
            layer.out_features, layer.in_features = layer.weight.shape
        case _ConvNd():
            if layer.groups == layer.in_channels == layer.out_channels:
                layer.groups = len(layer.weight) // layer.weight.shape[1]
            rows, columns = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
            layer.out_channels, layer.in_channels = (columns, rows) if layer.transposed else (rows, columns)
        case nn.Embedding():
            layer.num_embeddings, layer.embedding_dim = layer.weight.shape
        case nn.RNNBase():
            layer.input_size = layer.get_parameter("weight_ih_l0").shape[1]
            if not layer.proj_size:
                layer.hidden_size = layer.get_parameter("weight_hh_l0").shape[1]
        case nn.PReLU():
            layer.num_parameters = len(layer.weight)
        case _NormBase():
            per_channel = layer.running_mean if layer.weight is None else layer.weight
            layer.num_features = layer.num_features if per_channel is None else len(per_channel)
