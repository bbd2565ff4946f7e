"""Parts: one idea per file. A file dropped in here is found by itself; nothing else has to be told about it."""

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from shoal.core.part import Part

PRESETS = {
    "fedavg": "",
    "feddhad": "feddh+fedad",
    "feddhe": "feddh(labels='estimated')",
    "fedjs": "feddh(lr_v=0.0, lr_b=0.0)",
    "fedacd_base": "fedacd(weights='uniform')",
    "fedduap": "feddu+fedap",
    "feddum": "feddu+devicem+fedavgm(beta=0.5, ema=True, start='first')",
    "feddumap": "feddu+devicem+fedavgm(beta=0.5, ema=True, start='first')+fedap",
    "mofedsam": "fedsam+fedcm",
    "fedbr_ran": "fedbr(choose='random')",
    "serverm": "fedavgm",
}
"""Names for combinations; a method's own page says where they come from."""


@cache
def find_shipped_parts() -> dict[str, type[Part]]:
    """Every part of this package by its name."""
    parts: dict[str, type[Part]] = {}
    for module in pkgutil.iter_modules(__path__):
        parts |= find_parts_in(importlib.import_module(f"{__name__}.{module.name}"))
    return dict(sorted(parts.items()))


def find_parts_in(module: ModuleType) -> dict[str, type[Part]]:
    """The parts that a module defines itself."""
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Part) and c is not Part]
    return {c.name(): c for c in own if c.__module__ == module.__name__}
