"""Which filters a smaller model keeps: rates for each layer, and those filters whose maps say most."""

from collections.abc import Mapping
from math import floor

import torch
from torch import Tensor

from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.model.tree import Params
from shoal.parts.lib.submodel_units import compute_unit_strengths


def list_filter_axes(net: Net) -> list[Axis]:
    """The axes whose units make maps: filters, and heads; neurons are pruned only where there is nothing else."""
    return [axis for axis in net.axes if axis.tap] or list(net.axes)


def compute_layer_rates(net: Net, params: Params, rate: float) -> dict[str, float]:
    """The share of each layer's weights below the size that the share `rate` of all parameters lies below."""
    sizes = torch.cat([params[k].detach().abs().flatten().double().cpu() for k in net.trainable])
    place = floor(len(sizes) * rate)
    threshold = float(sizes.kthvalue(place).values) if place else 0.0
    found = {}
    for axis in list_filter_axes(net):
        made = {c.tensor for c in axis.cuts if not c.reads and c.tensor in net.trainable and params[c.tensor].dim() > 1}
        own = torch.cat([params[k].detach().abs().flatten().double().cpu() for k in sorted(made)])
        found[axis.name] = float((own < threshold).double().mean())
    return found


def choose_kept_filters(
    net: Net, params: Params, ranks: Mapping[str, Tensor], rates: Mapping[str, float]
) -> dict[str, Tensor]:
    """The units of each layer that stay, in order: of the highest rank, of equal ones the strongest; at least one.

    Strong is whose weights sum to more, as sizes; biases do not count, as they do not in `layer_rates`.
    """
    strong = compute_unit_strengths(net, params, biases=False)
    kept = {}
    for axis in list_filter_axes(net):
        stays = max(1, axis.size - floor(rates[axis.name] * axis.size + 1e-9))
        order = sorted(range(axis.size), key=lambda i, a=axis.name: (-float(ranks[a][i]), -float(strong[a][i]), i))
        kept[axis.name] = torch.tensor(sorted(order[:stays]))
    return {name: units for name, units in kept.items() if len(units) < len(ranks[name])}
