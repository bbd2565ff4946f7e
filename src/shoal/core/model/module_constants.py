"""What a module computes with beside the tensors of its net: its settings, and tensors that are in no `state_dict`.

They are no inputs of a traced step but part of it, so that modules which differ in them cannot share one.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MODULE_ATTRIBUTES = frozenset((*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"))
"""What torch notes about every module, and the parameters of recurrent layers in a list."""
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
MOST_LEVELS = 6
"""How deep values are looked for in lists, dicts and objects."""


def digest_constants(module: nn.Module) -> str:
    """A hash of the classes and settings of all layers, and of their tensors that are in no `state_dict`."""
    digest = blake2b(digest_size=20)
    for name, layer in module.named_modules():
        own: dict[str, Any] = {"class": type(layer)}
        own |= {key: value for key, value in vars(layer).items() if key not in MODULE_ATTRIBUTES}
        own |= {key: layer._buffers.get(key) for key in sorted(layer._non_persistent_buffers_set)}
        for piece in iterate_bytes(own, MOST_LEVELS):
            digest.update(f"{name} {len(piece)} ".encode() + piece)
    return digest.hexdigest()


def iterate_bytes(value: Any, levels: int) -> Iterator[bytes]:
    """What a value comes to; functions and classes come to their names."""
    if isinstance(value, PLAIN_TYPES):
        yield repr(value).encode()
    elif isinstance(value, (Tensor, np.ndarray)):
        yield describe_numbers(value)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, type) or callable(value):
        yield getattr(value, "__qualname__", type(value).__qualname__).encode()
    elif levels:
        is_sequence = isinstance(value, (list, tuple))
        held = dict(enumerate(value)) if is_sequence else value if isinstance(value, Mapping) else read_fields(value)
        for key, item in held.items():
            yield repr(key).encode()
            yield from iterate_bytes(item, levels - 1)


def describe_numbers(value: Any) -> bytes:
    """Type, shape and bytes of a tensor or an array; those that have no bytes of their own count as themselves."""
    try:
        numbers = torch.as_tensor(value).detach().cpu().contiguous()
        return (
            f"{numbers.dtype} {tuple(numbers.shape)} ".encode() + numbers.flatten().view(torch.uint8).numpy().tobytes()
        )
    except (RuntimeError, TypeError, ValueError):
        return f"{type(value)} at {id(value)}".encode()


def read_fields(value: Any) -> Mapping[str, Any]:
    return vars(value) if hasattr(value, "__dict__") else {}
