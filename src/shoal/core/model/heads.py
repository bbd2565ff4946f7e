"""Replacing the last layer (head) of a model, or adding tensors beside it, for parts that act at `model`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis


def find_head_layer(net: Net, part: str) -> tuple[str, nn.Linear]:
    """The name of the last linear layer, and the layer; an error that names `part` where there is none."""
    layer = net.module.get_submodule(net.head_name) if net.head_name else None
    if not isinstance(layer, nn.Linear):
        raise ShoalError(
            "bad-part",
            f"{part} works on the last linear layer, and the model has none.",
            "Use a model that ends with nn.Linear, or leave the part out.",
        )
    if f"{net.head_name}.weight" not in net.initial:
        raise ShoalError(
            "bad-part",
            f"{part} works on the last linear layer, and its weight is frozen or one tensor with another layer's.",
            "Give the model a last linear layer of its own, or leave the part out.",
        )
    return net.head_name, layer


def add_side_tensors(
    net: Net, name: str, tensors: Mapping[str, Tensor], role: str = "shared", reads_features: Sequence[str] = ()
) -> Net:
    """The net with further tensors, called NAME.KEY, that its own layers do not use.

    Those named in `reads_features` have a column for each feature, like the weight of the last layer, and are cut like
    it.
    """
    module = copy_module(net)
    module.add_module(name, SideTensors({k: v.to(net.dtype).to(net.place) for k, v in tensors.items()}))
    axes = tuple(
        extend_axis_columns(axis, f"{net.head_name}.weight", [f"{name}.{k}" for k in reads_features])
        for axis in net.axes
    )
    roles = dict(net.roles) | {f"{name}.{k}": role for k in tensors}
    return replace(net, module=module, axes=axes, roles=roles)


class SideTensors(nn.Module):
    """Tensors that no layer uses; as a layer it is the identity, so that it may stand in a chain of layers."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        for key, value in tensors.items():
            self.register_parameter(key, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return x


def list_side_tensors(net: Net) -> tuple[str, ...]:
    """The trained tensors beside the model, such as those of a device's second model."""
    if "personal" not in net.roles.values():
        return ()
    holders = tuple(f"{name}." for name, layer in net.module.named_modules() if isinstance(layer, SideTensors))
    return tuple(name for name in net.trainable if name.startswith(holders))


def extend_axis_columns(axis: Axis, like: str, tensors: Sequence[str]) -> Axis:
    """The axis with further tensors, whose columns are cut like those of the tensor `like`."""
    column_cuts = [cut for cut in axis.cuts if cut.tensor == like and cut.dim == 1]
    return replace(axis, cuts=(*axis.cuts, *(replace(cut, tensor=name) for cut in column_cuts for name in tensors)))


def replace_head(
    net: Net,
    make: Callable[[nn.Linear], nn.Module],
    roles: Mapping[str, str],
    part: str,
    moved: Mapping[tuple[str, int], str] | None = None,
) -> Net:
    """The net with `make(old layer)` as its last layer; tensors that keep their names are cut as before.

    `roles` gives roles to tensors of the new layer, by key. `moved` names, by key and dimension of the old layer, the
    tensor of the new one that is cut there instead.
    """
    name, _ = find_head_layer(net, part)
    module = copy_module(net)
    owner, _, key = name.rpartition(".")
    old = module.get_submodule(name)
    assert isinstance(old, nn.Linear)
    module.get_submodule(owner).add_module(key, make(old).to(net.dtype).to(net.place))
    names = module.state_dict().keys()
    new_names = {(f"{name}.{old}", dim): f"{name}.{new}" for (old, dim), new in (moved or {}).items()}

    def keep_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        cuts = ([replace(c, tensor=new_names.get((c.tensor, c.dim), c.tensor)) for c in a.cuts] for a in axes)
        kept = (replace(a, cuts=tuple(c for c in axis_cuts if c.tensor in names)) for a, axis_cuts in zip(axes, cuts))
        return tuple(a for a in kept if a.cuts)

    all_roles = {k: role for k, role in net.roles.items() if k in names} | {f"{name}.{k}": r for k, r in roles.items()}
    return replace(net, module=module, axes=keep_axes(net.axes), rows=keep_axes(net.rows), roles=all_roles, head=name)
