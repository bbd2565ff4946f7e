"""Trees as bytes on their way between machines: plain tensors and a line of JSON, read with suspicion."""

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
"""Bytes that tell how long the JSON is."""
MAX_TREE_DEPTH, MAX_TREE_NODES = 16, 100_000
"""A description that is deeper or longer is refused before it is looked at."""


def tree_to_bytes(content: Tree) -> bytes:
    """A tree in the form of a safetensors file; what is not a tensor stands in its header."""
    plain, flat = tree.pack_tree(content)
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items()}
    return save(tensors, {"shoal": json.dumps(plain)})


def tree_from_bytes(content: bytes, most: int) -> Tree:
    """The tree in at most so many bytes; whatever else they are, they are refused."""
    if len(content) > most:
        raise make_message_error(f"has {len(content)} bytes where at most {most} were to be expected")
    if (
        len(content) < HEADER_LENGTH_BYTES
        or int.from_bytes(content[:HEADER_LENGTH_BYTES], "little") > len(content) - HEADER_LENGTH_BYTES
    ):
        raise make_message_error("ends before its header does")
    try:
        header = json.loads(
            content[HEADER_LENGTH_BYTES : HEADER_LENGTH_BYTES + int.from_bytes(content[:HEADER_LENGTH_BYTES], "little")]
        )
        described: Any = json.loads(header["__metadata__"]["shoal"])
        if not is_bounded_description(described):
            raise make_message_error("has a description without end")
        return tree.unpack_tree(described, load(content))
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise make_message_error("cannot be read") from error


def is_bounded_description(described: Any) -> bool:
    """Whether a description is neither too deep nor too long."""
    level, nodes = [described], 0
    for _ in range(4 * MAX_TREE_DEPTH):
        nodes += len(level)
        if not level or nodes > MAX_TREE_NODES:
            break
        level = [below for node in level for below in list_children(node)]
    return not level and nodes <= MAX_TREE_NODES


def list_children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def make_message_error(why: str) -> ShoalError:
    return ShoalError("damaged", f"A message {why}.", "It was not used.")


def is_finite_and_bounded(content: Tree, bound: float) -> bool:
    """Whether every number is one, and no tensor is longer than the bound."""
    floats = [t for t in tree.collect_tensors(content) if t.is_floating_point()]
    return all(isfinite(length := float(torch.linalg.vector_norm(t.double()))) and length <= bound for t in floats)
