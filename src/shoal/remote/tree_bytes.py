"""Trees as bytes in the form of safetensors, with limits on what is read from an untrusted sender."""

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.tree import Tree

HEADER_LENGTH_BYTES = 8
"""Bytes at the beginning that hold the length of the JSON header."""
MAX_TREE_DEPTH, MAX_TREE_NODES = 16, 100_000
"""A tree that is deeper or has more nodes is refused before it is built."""


def tree_to_bytes(content: Tree) -> bytes:
    """A tree as a safetensors file; what is not a tensor stands in its header as JSON."""
    plain, flat = tree.pack_tree(content)
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items()}
    return save(tensors, {"shoal": json.dumps(plain)})


def tree_from_bytes(payload: bytes, max_bytes: int) -> Tree:
    """The tree in some bytes; more than `max_bytes`, and bytes that hold no tree, are refused."""
    if len(payload) > max_bytes:
        raise make_message_error(f"has {len(payload)} bytes where at most {max_bytes} were to be expected")
    if (
        len(payload) < HEADER_LENGTH_BYTES
        or int.from_bytes(payload[:HEADER_LENGTH_BYTES], "little") > len(payload) - HEADER_LENGTH_BYTES
    ):
        raise make_message_error("ends before its header does")
    try:
        header = json.loads(
            payload[HEADER_LENGTH_BYTES : HEADER_LENGTH_BYTES + int.from_bytes(payload[:HEADER_LENGTH_BYTES], "little")]
        )
        description: Any = json.loads(header["__metadata__"]["shoal"])
        if not is_bounded_description(description):
            raise make_message_error("has a description without end")
        return tree.unpack_tree(description, load(payload))
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise make_message_error("cannot be read") from error


def is_bounded_description(description: Any) -> bool:
    """Whether the description of a tree has at most MAX_TREE_DEPTH levels and MAX_TREE_NODES nodes."""
    level, nodes = [description], 0
    for _ in range(4 * MAX_TREE_DEPTH):
        nodes += len(level)
        if not level or nodes > MAX_TREE_NODES:
            break
        level = [child for node in level for child in list_children(node)]
    return not level and nodes <= MAX_TREE_NODES


def list_children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def make_message_error(why: str) -> ShoalError:
    return ShoalError("damaged", f"A message {why}.", "It was not used.")


def is_finite_and_bounded(content: Tree, max_norm: float) -> bool:
    """Whether all numbers are finite, and no tensor has a norm above `max_norm`."""
    floats = [t for t in tree.collect_tensors(content) if t.is_floating_point()]
    return all(isfinite(norm := float(torch.linalg.vector_norm(t.double()))) and norm <= max_norm for t in floats)
