"""Modules that nets have in use: a call puts plain tensors in place of their parameters, which a further net needs."""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from shoal.core.model.frozen import iterate_slots
from shoal.core.model.module_copy import set_module_tensors
from shoal.core.model.tree import Params


class FirstTensors(NamedTuple):
    """What a module held when a net was made of it."""

    tensors: Params
    with_gradient: frozenset[str]
    ties: dict[str, str]


FIRST_TENSORS: WeakKeyDictionary[nn.Module, FirstTensors] = WeakKeyDictionary()
"""By module, for as long as it lives; the tensors are those that its net keeps anyway."""


def note_first_tensors(module: nn.Module, tensors: Params, ties: dict[str, str]) -> None:
    """Remember what a module holds before the first call of its net."""
    with_gradient = frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    FIRST_TENSORS[module] = FirstTensors(tensors, with_gradient, ties)


def is_in_use(module: nn.Module) -> bool:
    """Whether a net has put other tensors in place of the parameters of a module."""
    if module not in FIRST_TENSORS:
        return False
    holders = {id(layer._parameters) for layer in module.modules()}
    return any(id(s.holder) in holders and not isinstance(s.tensor, nn.Parameter) for s in iterate_slots(module))


def restore_first_parameters(module: nn.Module) -> None:
    """Give a module that is in use parameters again, with the values of before the first call; others stay as is."""
    if is_in_use(module):
        first = FIRST_TENSORS[module]
        frozen = {name: own for name, own in first.tensors.items() if isinstance(own, nn.Parameter)}
        others = {name: own.detach().clone() for name, own in first.tensors.items() if name not in frozen}
        set_module_tensors(module, frozen | others, first.with_gradient, first.ties)
