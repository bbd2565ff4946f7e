"""Copies of a net's template module, and layers that are brought in line with tensors that were cut."""

from copy import deepcopy
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

if TYPE_CHECKING:
    from shoal.core.model.net import Net


def copy_module(net: "Net") -> nn.Module:
    """A copy of the template with its first tensors and without the hooks."""
    for holder, key, name in net._slots:
        holder[key] = net.initial[name]
    module = deepcopy(net.module)
    for layer in module.modules():
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()
    trainable = set(net.trainable)
    for prefix, layer in module.named_modules():
        for key, value in layer._parameters.items():
            if value is not None:
                name = f"{prefix}.{key}" if prefix else key
                layer._parameters[key] = nn.Parameter(value.detach(), name in trainable)
    return module


def update_layer_sizes(layer: nn.Module) -> None:
    """Correct the numbers a layer keeps about itself after its tensors were cut."""
    match layer:
        case nn.Linear():
            layer.out_features, layer.in_features = layer.weight.shape
        case _ConvNd():
            if layer.groups == layer.in_channels == layer.out_channels:
                layer.groups = len(layer.weight) // layer.weight.shape[1]
            own, other = layer.weight.shape[0], layer.weight.shape[1] * layer.groups
            layer.out_channels, layer.in_channels = (other, own) if layer.transposed else (own, other)
        case nn.Embedding():
            layer.num_embeddings, layer.embedding_dim = layer.weight.shape
        case nn.RNNBase():
            layer.input_size = layer.get_parameter("weight_ih_l0").shape[1]
            if not layer.proj_size:
                layer.hidden_size = layer.get_parameter("weight_hh_l0").shape[1]
        case nn.PReLU():
            layer.num_parameters = len(layer.weight)
        case _NormBase():
            told = layer.running_mean if layer.weight is None else layer.weight
            layer.num_features = layer.num_features if told is None else len(told)
