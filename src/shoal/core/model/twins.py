"""A second model on every device: a net whose trained tensors all have a twin, which its layers do not use."""

from dataclasses import replace

from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model.heads import SideTensors, list_side_tensors
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis
from shoal.core.model.tree import Params


def add_twins(net: Net, twin: str, part: str) -> Net:
    """The net with a personal copy of every tensor that the model trains, called TWIN.NAME and cut like it."""
    if net.mixes_batch:
        problem = f"{part} trains two models on a device, and batch norm keeps the statistics of one."
        raise ShoalError("bad-part", problem, "Use a model with group norm, or without norms.")
    module, beside = copy_module(net), list_side_tensors(net)
    names = [name for name in net.trainable if name not in beside]
    holder = SideTensors({})
    for name in names:
        place_parameter(holder, name, net.initial[name].clone())
    module.add_module(twin, holder)

    def cut_twins(axis: Axis) -> Axis:
        own = (replace(cut, tensor=f"{twin}.{cut.tensor}") for cut in axis.cuts if cut.tensor in names)
        return replace(axis, cuts=(*axis.cuts, *own))

    roles = dict(net.roles) | {f"{twin}.{name}": "personal" for name in names}
    axes, rows = (tuple(map(cut_twins, axes)) for axes in (net.axes, net.rows))
    return replace(net, module=module, axes=axes, rows=rows, roles=roles)


def place_parameter(holder: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter under a name with dots into a module, with further modules in between."""
    *path, key = name.split(".")
    for piece in path:
        if piece not in holder._modules:
            holder.add_module(piece, SideTensors({}))
        holder = holder.get_submodule(piece)
    holder.register_parameter(key, nn.Parameter(value))


def list_twins(params: Params, twin: str) -> Params:
    """The twins, by the name of what each is the twin of; without those of tensors that another part took away."""
    start = f"{twin}."
    twins = {k.removeprefix(start): value for k, value in params.items() if k.startswith(start)}
    return {name: value for name, value in twins.items() if name in params}


def put_twins_in_place(params: Params, twin: str) -> Params:
    """The parameters with every twin in the place of what it is the twin of."""
    return params | list_twins(params, twin)


def detach_twins(params: Params, twin: str) -> Params:
    """The parameters with twins that get no gradient."""
    return {k: value.detach() if k.startswith(f"{twin}.") else value for k, value in params.items()}
