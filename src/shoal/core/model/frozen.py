"""Frozen tensors, which nobody trains and nobody sends, and tied ones, which several layers hold."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.core.model.plan import Axis


class TensorSlot(NamedTuple):
    """Where a module holds a tensor: the dict of a layer, the key in it, and the name in the state dict."""

    holder: dict[str, Any]
    key: str
    name: str
    tensor: Tensor


def iterate_slots(module: nn.Module) -> Iterator[TensorSlot]:
    """Every slot of a module in the order of its state dict; layers that it holds twice come twice."""
    for prefix, layer in module.named_modules(remove_duplicate=False):
        for holder in (layer._parameters, layer._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    yield TensorSlot(holder, key, f"{prefix}.{key}" if prefix else key, tensor)


def find_tied_names(module: nn.Module) -> dict[str, str]:
    """For every further name of a tensor that a module holds several times, its first name."""
    first: dict[int, str] = {}
    names = {slot.name: first.setdefault(id(slot.tensor), slot.name) for slot in iterate_slots(module)}
    return {name: own for name, own in names.items() if name != own}


def find_frozen_names(module: nn.Module, roles: Mapping[str, str]) -> frozenset[str]:
    """The names of the frozen tensors: the role says so, or there is no role and the tensor needs no gradient.

    The statistics of a batch norm whose parameters are all frozen are frozen with them.
    """
    frozen = {name for name, role in roles.items() if role == "frozen"}
    frozen |= {name for name, p in module.named_parameters() if not p.requires_grad and name not in roles}
    for prefix, layer in module.named_modules():
        own = [f"{prefix}.{key}".strip(".") for key, p in layer.named_parameters(recurse=False) if p is not None]
        if isinstance(layer, _NormBase) and own and frozen.issuperset(own):
            statistics = (f"{prefix}.{key}".strip(".") for key, _ in layer.named_buffers(recurse=False))
            frozen |= {name for name in statistics if name not in roles}
    return frozenset(frozen)


def find_frozen_norms(module: nn.Module, frozen: frozenset[str]) -> tuple[nn.Module, ...]:
    """The norms whose statistics are frozen: they normalise by them in training, too."""
    return tuple(
        layer
        for prefix, layer in module.named_modules()
        if isinstance(layer, _NormBase) and f"{prefix}.running_mean".strip(".") in frozen
    )


def drop_uncuttable_axes(axes: tuple[Axis, ...], uncuttable: frozenset[str]) -> tuple[Axis, ...]:
    """The axes that cut none of these tensors."""
    return tuple(axis for axis in axes if uncuttable.isdisjoint(cut.tensor for cut in axis.cuts))
