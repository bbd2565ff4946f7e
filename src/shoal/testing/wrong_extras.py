"""Wrong extras: every way in which what a device sends beside the model can differ from what its part declares."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.extras import LARGEST, Declaration, Extra


def list_wrong_extras(entries: Mapping[str, Any], declared: Declaration) -> Iterator[tuple[str, dict[str, Any]]]:
    """Words, and the extras of a part with one fault: type, shape, range, a name too many or too few.

    Only what was sent can be wrong; what may be left out is not left out here.
    """
    yield "a name too many", {**entries, "stranger": torch.ones(3)}
    for name, value in entries.items():
        extra = declared[name]
        if not extra.optional:
            yield f"no {name}", {k: v for k, v in entries.items() if k != name}
        for words, wrong in list_wrong_values(value, extra):
            yield f"{name} {words}", {**entries, name: wrong}


def list_wrong_values(value: Any, extra: Extra) -> Iterator[tuple[str, Any]]:
    """Words, and one extra that is not as declared; of a dict of tensors, the first tensor is wrong."""
    if isinstance(value, Mapping):
        first, *_ = value
        yield "without a name", {k: v for k, v in value.items() if k != first}
        yield "with a stranger", {**value, "stranger": value[first]}
        for words, wrong in list_wrong_tensors(value[first], extra):
            yield words, {**value, first: wrong}
        return
    yield "as a dict", {"x": value}
    yield from list_wrong_tensors(value, extra)


def list_wrong_tensors(tensor: Tensor, extra: Extra) -> Iterator[tuple[str, Any]]:
    """Words, and a tensor (or what is none) that is not as declared."""
    yield "as a plain number", 1
    yield "with a side too many", tensor[None]
    yield "of another type", tensor.long() if tensor.is_floating_point() else tensor.float()
    if tensor.numel() == 0:
        return
    yield "too long", torch.cat((tensor, tensor)) if tensor.dim() else tensor.repeat(2)
    if extra.like == "bits":
        return
    if tensor.is_floating_point():
        yield "not a number", torch.full_like(tensor, torch.nan)
        yield "1e38", torch.full_like(tensor, 1e38)
        yield "-1e38", torch.full_like(tensor, -1e38)
    if extra.low > -LARGEST:
        yield "too low", torch.full_like(tensor, extra.low - 1)
    if extra.high < LARGEST:
        yield "too high", torch.full_like(tensor, extra.high + 1)
