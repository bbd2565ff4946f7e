"""How much each unit of a model matters: the rank of its maps, or the size of the weights that make it."""

import torch
from torch import Tensor

from shoal.core.net import Net
from shoal.core.plan import Axis
from shoal.core.tree import Params


@torch.no_grad()
def scores(net: Net, params: Params, inputs: Tensor) -> dict[str, Tensor]:
    """By axis, one number for each unit.

    Where units have maps (filters, heads): the mean rank of a unit's map over the inputs, as a share of the largest
    that it could have (HRank, Lin et al. 2020). Else the sum of the absolute weights that make the unit, as a multiple
    of the mean over its axis.
    """
    taps = tuple(dict.fromkeys(axis.tap for axis in net.axes if axis.tap))
    seen = net.apply(params, inputs, taps)[2] if taps else {}
    return {a.name: ranks(maps(seen[a.tap], a)) if a.tap else sizes(params, a) for a in net.axes}


def maps(output: Tensor, axis: Axis) -> Tensor:
    """What a module put out as samples x units x rows x columns: images, or positions of concatenated heads."""
    return output if output.dim() == 4 else output.unflatten(-1, (axis.size, -1)).transpose(1, 2)


def ranks(found: Tensor) -> Tensor:
    return torch.linalg.matrix_rank(found.float()).float().mean(0) / min(found.shape[-2:])


def sizes(params: Params, axis: Axis) -> Tensor:
    total = torch.zeros(axis.size)
    for cut in axis.cuts:
        weight = params[cut.tensor]
        if not cut.reads and weight.dim() > 1:
            lines = weight.abs().sum([d for d in range(weight.dim()) if d != cut.dim])
            total = total.to(lines) + lines.view(cut.copies, axis.size, cut.span).sum((0, 2))
    return (total / total.mean().clamp(min=1e-12)).float()
