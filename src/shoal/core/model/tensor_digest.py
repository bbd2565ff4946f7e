"""Hashes of tensors: names, types, shapes and bytes, without pickle."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

PIECE = 2**26
"""Bytes that are hashed at a time, which bounds what is copied."""


def hash_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor's name, dtype, shape and bytes to a hash."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    rows = tensor.detach() if tensor.dim() else tensor.detach().reshape(1)
    if rows.numel():
        for piece in rows.split(max(1, PIECE // (rows[0].numel() * rows.element_size()))):
            digest.update(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def compute_digest(tensors: Mapping[str, Tensor]) -> str:
    """32 digits for tensors by name, the same whatever their order and wherever they lie; "" for none."""
    if not tensors:
        return ""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        hash_tensor(digest, name, tensors[name])
    return digest.hexdigest()
