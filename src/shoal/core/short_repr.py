"""Short representations: what something is and how large, never the numbers of its tensors."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

WIDTH = 100
"""Characters from which each field has a line of its own."""
MAX_FIELDS = 17


def make_short_repr(thing: Any) -> str:
    """The class of a dataclass or a named tuple, and its fields in few words."""
    names = [f.name for f in fields(thing)] if is_dataclass(thing) else list(thing._fields)
    named = [f"{name}={shorten_value(getattr(thing, name))}" for name in names[:MAX_FIELDS]]
    named += ["..."] if len(names) > MAX_FIELDS else []
    text = f"{type(thing).__name__}({', '.join(named)})"
    return text if len(text) <= WIDTH else f"{type(thing).__name__}(\n  " + ",\n  ".join(named) + "\n)"


def shorten_value(value: Any) -> str:
    """A plain value as it is, a tensor by its type and shape, a collection by what it holds."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        return shorten_mapping(value)
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (str, bytes)):
        if len(value) <= 4 and all(isinstance(v, (int, float, str, type(None))) for v in value):
            return cut_text(repr(value))
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return cut_text(repr(value))
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return type(value).__name__


def shorten_mapping(value: Mapping[Any, Any]) -> str:
    if not value:
        return "{}"
    if all(isinstance(v, Tensor) for v in value.values()):
        numbers = sum(v.numel() for v in value.values())
        return f"{{{len(value)} tensors, {numbers:,} numbers}}"
    names = ", ".join(str(k) for k in list(value)[:4]) + (", ..." if len(value) > 4 else "")
    return cut_text(f"{{{names}}}")


def cut_text(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
