"""Hyperparameters that differ between runs which share a program: they become tensors, one value per device."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.core.compose import Method
from shoal.core.local.device import TrainingSetup
from shoal.core.local.step import StepRule

Hyperparam: TypeAlias = tuple[int, str]
"""Which part of the method (-1: the optimiser), and the name of a field of it."""


def list_hyperparam_owners(setup: TrainingSetup) -> list[tuple[int, Any]]:
    """What has hyperparameters: the parts by their position, and the optimiser as -1."""
    return [*enumerate(setup.method.parts), (-1, setup.optimiser)]


def find_varying_hyperparams(setups: Iterable[TrainingSetup]) -> list[Hyperparam]:
    """The float fields in which runs of the same parts differ; those of parts that build the model are left out."""
    values_by_method: dict[tuple, dict[Hyperparam, set[float]]] = {}
    for setup in setups:
        values = values_by_method.setdefault(tuple(type(p) for p in setup.method.parts), {})
        for index, owner in list_hyperparam_owners(setup):
            if index >= 0 and owner.acts_at("model"):
                continue
            for f in fields(owner):
                value = getattr(owner, f.name)
                if type(value) is float:
                    values.setdefault((index, f.name), set()).add(value)
    return sorted(
        {
            hyperparam
            for values in values_by_method.values()
            for hyperparam, distinct in values.items()
            if len(distinct) > 1
        }
    )


def build_program_key(setup: TrainingSetup, hyperparams: Sequence[Hyperparam]) -> tuple:
    """What setups must have in common to share programs: the model, and all settings but those hyperparameters."""
    parts = []
    for index, owner in list_hyperparam_owners(setup):
        settings = [(f.name, getattr(owner, f.name)) for f in fields(owner) if (index, f.name) not in hyperparams]
        parts.append((type(owner), *settings))
    net = setup.net
    of_model = (setup.kind or id(net.module), net.shapes, net.digest, net.constants_digest)
    return (*of_model, *parts, str(setup.augment))


def filter_hyperparams(setup: TrainingSetup, hyperparams: Sequence[Hyperparam]) -> list[Hyperparam]:
    """Those hyperparameters that a setup has."""
    owners = dict(list_hyperparam_owners(setup))
    return [(index, name) for index, name in hyperparams if index in owners and hasattr(owners[index], name)]


def find_hyperparam_field(setup: TrainingSetup, hyperparam: Hyperparam) -> tuple[type, str]:
    """The class that has this hyperparameter in a setup, and the name of the field."""
    index, name = hyperparam
    return type(dict(list_hyperparam_owners(setup)).get(index)), name


def read_hyperparams(setup: TrainingSetup, hyperparams: Sequence[Hyperparam]) -> list[Tensor]:
    """The values of those hyperparameters in a setup, as tensors without dimensions."""
    owners = dict(list_hyperparam_owners(setup))
    return [
        torch.tensor(getattr(owners[index], name), dtype=setup.net.dtype)
        for index, name in filter_hyperparams(setup, hyperparams)
    ]


def substitute_hyperparams(
    setup: TrainingSetup, hyperparams: Sequence[Hyperparam], tensors: Sequence[Tensor]
) -> StepRule:
    """The setup's step rule with tensors in place of those hyperparameters; no part checks its values again."""
    owners = {index: copy(owner) for index, owner in list_hyperparam_owners(setup)}
    for (index, name), value in zip(filter_hyperparams(setup, hyperparams), tensors, strict=True):
        object.__setattr__(owners[index], name, value)
    optimiser = owners.pop(-1)
    return replace(setup.rule, method=Method(tuple(owners.values())), optimiser=optimiser)
