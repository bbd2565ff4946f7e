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

HEAD = 8
"""Bytes that tell how long the JSON is."""
DEPTH, NODES = 16, 100_000
"""A description that is deeper or longer is refused before it is looked at."""


def wrapped(content: Tree) -> bytes:
    """A tree in the form of a safetensors file; what is not a tensor stands in its header."""
    plain, flat = tree.pack_tree(content)
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items()}
    return save(tensors, {"shoal": json.dumps(plain)})


def unwrapped(content: bytes, most: int) -> Tree:
    """The tree in at most so many bytes; whatever else they are, they are refused."""
    if len(content) > most:
        raise refused(f"has {len(content)} bytes where at most {most} were to be expected")
    if len(content) < HEAD or int.from_bytes(content[:HEAD], "little") > len(content) - HEAD:
        raise refused("ends before its header does")
    try:
        header = json.loads(content[HEAD : HEAD + int.from_bytes(content[:HEAD], "little")])
        described: Any = json.loads(header["__metadata__"]["shoal"])
        if not sized(described):
            raise refused("has a description without end")
        return tree.unpack_tree(described, load(content))
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise refused("cannot be read") from error


def sized(described: Any) -> bool:
    """Whether a description is neither too deep nor too long."""
    level, nodes = [described], 0
    for _ in range(4 * DEPTH):
        nodes += len(level)
        if not level or nodes > NODES:
            break
        level = [below for node in level for below in inside(node)]
    return not level and nodes <= NODES


def inside(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


def refused(why: str) -> ShoalError:
    return ShoalError("damaged", f"A message {why}.", "It was not used.")


def sound(content: Tree, bound: float) -> bool:
    """Whether every number is one, and no tensor is longer than the bound."""
    floats = [t for t in tree.collect_tensors(content) if t.is_floating_point()]
    return all(isfinite(length := float(torch.linalg.vector_norm(t.double()))) and length <= bound for t in floats)
