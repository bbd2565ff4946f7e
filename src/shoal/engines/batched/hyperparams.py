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

Knob: TypeAlias = tuple[int, str]
"""Which part of the method (-1: the optimiser), and the name of a field of it."""


def holders(site: TrainingSetup) -> list[tuple[int, Any]]:
    """What has numbers: the parts, and the optimiser."""
    return [*enumerate(site.method.parts), (-1, site.optimiser)]


def knobs_of(sites: Iterable[TrainingSetup]) -> list[Knob]:
    """The numbers in which runs of the same parts differ. A part that builds the model with them is left alone."""
    seen: dict[tuple, dict[Knob, set[float]]] = {}
    for site in sites:
        own = seen.setdefault(tuple(type(p) for p in site.method.parts), {})
        for at, holder in holders(site):
            if at >= 0 and holder.acts_at("model"):
                continue
            for f in fields(holder):
                value = getattr(holder, f.name)
                if type(value) is float:
                    own.setdefault((at, f.name), set()).add(value)
    return sorted({knob for own in seen.values() for knob, found in own.items() if len(found) > 1})


def skeleton(site: TrainingSetup, knobs: Sequence[Knob]) -> tuple:
    """What sites must have in common to share programs: the model, and the rule without those numbers."""
    parts = []
    for at, holder in holders(site):
        settings = [(f.name, getattr(holder, f.name)) for f in fields(holder) if (at, f.name) not in knobs]
        parts.append((type(holder), *settings))
    return (site.kind or id(site.net.module), site.net.shapes, *parts, str(site.augment))


def had_by(site: TrainingSetup, knobs: Sequence[Knob]) -> list[Knob]:
    """Those that a site has."""
    found = dict(holders(site))
    return [(at, name) for at, name in knobs if at in found and hasattr(found[at], name)]


def field_of(site: TrainingSetup, knob: Knob) -> tuple[type, str]:
    """The class that has such a number in this site, and the name of the field."""
    at, name = knob
    return type(dict(holders(site)).get(at)), name


def values(site: TrainingSetup, knobs: Sequence[Knob]) -> list[Tensor]:
    """The numbers themselves."""
    found = dict(holders(site))
    return [torch.tensor(getattr(found[at], name), dtype=site.net.dtype) for at, name in had_by(site, knobs)]


def turned(site: TrainingSetup, knobs: Sequence[Knob], given: Sequence[Tensor]) -> StepRule:
    """The site's rule with those numbers as tensors; they were checked when the parts were made."""
    found = {at: copy(holder) for at, holder in holders(site)}
    for (at, name), value in zip(had_by(site, knobs), given, strict=True):
        object.__setattr__(found[at], name, value)
    optimiser = found.pop(-1)
    return replace(site.rule, method=Method(tuple(found.values())), optimiser=optimiser)
