"""Parts: one idea per file. A file dropped in here is found by itself; nothing else has to be told about it.

Classes are here by their names, too: `from shoal.parts import FedProx, Scaffold`.
"""

import importlib
import pkgutil
from difflib import get_close_matches
from functools import cache
from types import ModuleType
from typing import Any

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
    "ffalora": "lora(a='frozen')",
    "fedsalora": "lora(b='personal')",
}
"""Names for combinations; a method's own page says where they come from."""


@cache
def find_shipped_parts() -> dict[str, type[Part]]:
    """Every part of this package by its name."""
    parts: dict[str, type[Part]] = {}
    for module in pkgutil.iter_modules(__path__):
        parts |= find_parts_in(importlib.import_module(f"{__name__}.{module.name}"))
    return dict(sorted(parts.items()))


def __getattr__(name: str) -> Any:
    """The class of a shipped part, by its name; all of them are imported when the first is asked for."""
    classes = {} if name.startswith("_") else {cls.__name__: cls for cls in find_shipped_parts().values()}
    if name not in classes:
        close = get_close_matches(name, classes, 1)
        hint = f"; there is {close[0]}" if close else ""
        raise AttributeError(f"module {__name__!r} has no part {name!r}{hint}")
    return classes[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *(cls.__name__ for cls in find_shipped_parts().values())})


def find_parts_in(module: ModuleType) -> dict[str, type[Part]]:
    """The parts that a module defines itself."""
    own = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, Part) and c is not Part]
    return {c.name(): c for c in own if c.__module__ == module.__name__}
