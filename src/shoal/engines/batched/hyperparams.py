"""Numbers that differ between runs which share a program: they become tensors, one value per lane."""

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


def list_hyperparam_owners(site: TrainingSetup) -> list[tuple[int, Any]]:
    """What has numbers: the parts, and the optimiser."""
    return [*enumerate(site.method.parts), (-1, site.optimiser)]


def find_varying_hyperparams(sites: Iterable[TrainingSetup]) -> list[Hyperparam]:
    """The numbers in which runs of the same parts differ. A part that builds the model with them is left alone."""
    seen: dict[tuple, dict[Hyperparam, set[float]]] = {}
    for site in sites:
        own = seen.setdefault(tuple(type(p) for p in site.method.parts), {})
        for at, holder in list_hyperparam_owners(site):
            if at >= 0 and holder.acts_at("model"):
                continue
            for f in fields(holder):
                value = getattr(holder, f.name)
                if type(value) is float:
                    own.setdefault((at, f.name), set()).add(value)
    return sorted({knob for own in seen.values() for knob, found in own.items() if len(found) > 1})


def build_program_key(site: TrainingSetup, knobs: Sequence[Hyperparam]) -> tuple:
    """What sites must have in common to share programs: the model, and the rule without those numbers."""
    parts = []
    for at, holder in list_hyperparam_owners(site):
        settings = [(f.name, getattr(holder, f.name)) for f in fields(holder) if (at, f.name) not in knobs]
        parts.append((type(holder), *settings))
    return (site.kind or id(site.net.module), site.net.shapes, *parts, str(site.augment))


def filter_hyperparams(site: TrainingSetup, knobs: Sequence[Hyperparam]) -> list[Hyperparam]:
    """Those that a site has."""
    found = dict(list_hyperparam_owners(site))
    return [(at, name) for at, name in knobs if at in found and hasattr(found[at], name)]


def find_hyperparam_field(site: TrainingSetup, knob: Hyperparam) -> tuple[type, str]:
    """The class that has such a number in this site, and the name of the field."""
    at, name = knob
    return type(dict(list_hyperparam_owners(site)).get(at)), name


def read_hyperparams(site: TrainingSetup, knobs: Sequence[Hyperparam]) -> list[Tensor]:
    """The numbers themselves."""
    found = dict(list_hyperparam_owners(site))
    return [
        torch.tensor(getattr(found[at], name), dtype=site.net.dtype) for at, name in filter_hyperparams(site, knobs)
    ]


def substitute_hyperparams(site: TrainingSetup, knobs: Sequence[Hyperparam], given: Sequence[Tensor]) -> StepRule:
    """The site's rule with those numbers as tensors; they were checked when the parts were made."""
    found = {at: copy(holder) for at, holder in list_hyperparam_owners(site)}
    for (at, name), value in zip(filter_hyperparams(site, knobs), given, strict=True):
        object.__setattr__(found[at], name, value)
    optimiser = found.pop(-1)
    return replace(site.rule, method=Method(tuple(found.values())), optimiser=optimiser)
