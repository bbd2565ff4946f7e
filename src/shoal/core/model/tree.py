"""Trees: dicts of tensors by parameter name, the states built of them, and their plain form for disk and wire."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
Tree: TypeAlias = Any
"""A tensor, a JSON scalar, or a dict, list or tuple of trees."""


def make_zeros(like: Mapping[str, Tensor]) -> Params:
    return {k: torch.zeros_like(v) for k, v in like.items()}


def add_params(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    return {k: v + b[k] for k, v in a.items()}


def subtract_params(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    if a and next(iter(a.values())).is_cuda:
        return dict(zip(a, torch._foreach_sub(list(a.values()), [b[k] for k in a])))  # pyright: ignore[reportPrivateImportUsage]
    return {k: v - b[k] for k, v in a.items()}


def scale_params(a: Mapping[str, Tensor], factor: float | Tensor) -> Params:
    return {k: v * factor for k, v in a.items()}


def dot_params(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([(v * b[k]).sum() for k, v in a.items()]).sum()


def select_params(a: Mapping[str, Tensor], names) -> Params:
    return {k: a[k] for k in names if k in a}


def detach_params(a: Mapping[str, Tensor]) -> Params:
    return {k: v.detach() for k, v in a.items()}


def select_where(live: Tensor, new: Tree, old: Tree) -> Tree:
    """`new` where `live` is true, else `old`; the gate of padded steps."""
    return map_tensor_pairs(lambda n, o: torch.where(live, n, o), new, old)


def map_tensors(f: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, (dict, Mapping)):
        return {k: map_tensors(f, v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return rebuild_sequence(tree, (map_tensors(f, v) for v in tree))
    return tree


def rebuild_sequence(like: list | tuple, values: Iterable[Tree]) -> Tree:
    """A sequence of the same kind with other values."""
    make = getattr(like, "_make", type(like))
    return make(values)


def map_tensor_pairs(f: Callable[[Tensor, Tensor], Tensor], a: Tree, b: Tree) -> Tree:
    if isinstance(a, Tensor):
        return f(a, b)
    if isinstance(a, Mapping):
        return {k: map_tensor_pairs(f, v, b[k]) for k, v in a.items()}
    if isinstance(a, (list, tuple)):
        return rebuild_sequence(a, (map_tensor_pairs(f, v, w) for v, w in zip(a, b, strict=True)))
    return a


def collect_tensors(tree: Tree) -> list[Tensor]:
    """Every tensor of a tree, in order."""
    found: list[Tensor] = []
    _append_tensors(tree, found)
    return found


def _append_tensors(tree: Tree, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (dict, Mapping)):
        for v in tree.values():
            _append_tensors(v, found)
    elif isinstance(tree, (list, tuple)):
        for v in tree:
            _append_tensors(v, found)


def refill_tensors(tree: Tree, values: Iterable[Tensor]) -> Tree:
    """The same tree with other tensors, in the order of `tensors`."""
    given = iter(values)
    return map_tensors(lambda _: next(given), tree)


def outline_tree(tree: Tree) -> Any:
    """What is left of a tree when the numbers in its tensors are forgotten; equal outlines can be stacked."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, (dict, Mapping)):
        return tuple([(k, outline_tree(v)) for k, v in tree.items()])
    if isinstance(tree, (list, tuple)):
        return tuple(outline_tree(v) for v in tree)
    return tree


def count_tree_bytes(tree: Tree) -> int:
    return sum(t.nbytes for t in collect_tensors(tree))


def is_tree_finite(tree: Tree) -> bool:
    """Whether every number is one. A finite sum says so at once; only a sum that is not has to be looked into."""
    floats = [t for t in collect_tensors(tree) if t.is_floating_point()]
    return all(isfinite(t.sum().item()) or bool(t.isfinite().all()) for t in floats)


def check_each_finite(trees: Sequence[Tree]) -> list[bool]:
    """The same for each of several trees; on a GPU with one look at all of them."""
    floats = [[t for t in collect_tensors(one) if t.is_floating_point() and t.numel()] for one in trees]
    if not any(t.is_cuda for own in floats for t in own):
        return [is_tree_finite(one) for one in trees]
    flat = [t for own in floats for t in own]
    largest = torch._foreach_norm(flat, float("inf"))  # pyright: ignore[reportPrivateImportUsage]
    same = len({(n.dtype, n.device) for n in largest}) == 1
    found = iter(torch.stack(largest if same else [n.double().cpu() for n in largest]).isfinite().tolist())
    return [all([next(found) for _ in own]) for own in floats]


def is_same_tree(a: Tree, b: Tree) -> bool:
    """Equal structure, types and bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(is_same_tree(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(is_same_tree(v, w) for v, w in zip(a, b))
    return type(a) is type(b) and a == b


def pack_tree(tree: Tree) -> tuple[Any, Params]:
    """A tree as JSON plus flat tensors: what a checkpoint stores instead of a pickle."""
    flat: Params = {}

    def pack_node(node: Tree) -> Any:
        if isinstance(node, Tensor):
            flat[str(len(flat))] = node
            return {"tensor": str(len(flat) - 1)}
        if isinstance(node, Mapping):
            return {"dict": [[k, pack_node(v)] for k, v in node.items()]}
        if isinstance(node, (list, tuple)):
            return {type(node).__name__: [pack_node(v) for v in node]}
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        raise TypeError(f"a state may hold tensors, numbers, text, dicts, lists and tuples, not {type(node).__name__}")

    return pack_node(tree), flat


def unpack_tree(plain: Any, flat: Mapping[str, Tensor]) -> Tree:
    """The tree that `pack` took apart."""
    if not isinstance(plain, dict):
        return plain
    (kind, inside), *rest = plain.items()
    if rest:
        raise ValueError("a node of a stored tree has more than one kind")
    match kind:
        case "tensor":
            return flat[inside]
        case "dict":
            return {k: unpack_tree(v, flat) for k, v in inside}
        case "list":
            return [unpack_tree(v, flat) for v in inside]
        case "tuple":
            return tuple(unpack_tree(v, flat) for v in inside)
    raise ValueError(f"a node of a stored tree is of an unknown kind, {kind!r}")
