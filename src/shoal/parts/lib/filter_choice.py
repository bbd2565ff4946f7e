"""Which filters a pruned model keeps: a rate for each layer, and the filters whose maps have the highest rank."""

from collections.abc import Mapping
from math import floor

import torch
from torch import Tensor

from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.model.tree import Params
from shoal.parts.lib.submodel_units import compute_unit_strengths


def list_filter_axes(net: Net) -> list[Axis]:
    """The axes of filters and attention heads, whose units make maps; those of neurons in a model without any."""
    return [axis for axis in net.axes if axis.tap] or list(net.axes)


def compute_layer_rates(net: Net, params: Params, rate: float) -> dict[str, float]:
    """p_l* of each layer (FedAP, Algorithm 3, lines 6-11): the share of its weights with |v| < V.

    V is the floor(R p*)-th smallest of the R absolute parameters; 0, so that nothing is pruned, where that is none.
    """
    sizes = torch.cat([params[k].detach().abs().flatten().double().cpu() for k in net.trainable])
    place = floor(len(sizes) * rate)
    threshold = float(sizes.kthvalue(place).values) if place else 0.0
    rates = {}
    for axis in list_filter_axes(net):
        tensors = {
            c.tensor for c in axis.cuts if not c.reads and c.tensor in net.trainable and params[c.tensor].dim() > 1
        }
        weights = torch.cat([params[k].detach().abs().flatten().double().cpu() for k in sorted(tensors)])
        rates[axis.name] = float((weights < threshold).double().mean())
    return rates


def choose_kept_filters(
    net: Net, params: Params, ranks: Mapping[str, Tensor], rates: Mapping[str, float]
) -> dict[str, Tensor]:
    """By layer, the sorted units that stay (lines 13-14): the last d_l - floor(p_l* d_l) by rank, and at least one.

    Of units with equal ranks those with the larger sum of absolute weights stay; biases do not count, as they do not in
    `compute_layer_rates`. Layers that keep all their units are left out.
    """
    strengths = compute_unit_strengths(net, params, biases=False)
    kept = {}
    for axis in list_filter_axes(net):
        # 1e-9: 0.29 * 100 is 28.999999999999996 and means 29
        stay = max(1, axis.size - floor(rates[axis.name] * axis.size + 1e-9))
        order = sorted(range(axis.size), key=lambda i, a=axis.name: (-float(ranks[a][i]), -float(strengths[a][i]), i))
        kept[axis.name] = torch.tensor(sorted(order[:stay]))
    return {name: units for name, units in kept.items() if len(units) < len(ranks[name])}
