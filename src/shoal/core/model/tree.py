"""Arithmetic on dicts of tensors, and trees of them: mapping, comparing, and packing as JSON plus flat tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.core.model.foreach import compute_max_norms, subtract_each

Params: TypeAlias = dict[str, Tensor]
"""Tensors by parameter name."""
Tree: TypeAlias = Any
"""A tensor, a JSON scalar, or a dict, list or tuple of trees."""


def make_zeros(like: Mapping[str, Tensor]) -> Params:
    """Zeros of the same names, shapes and types."""
    return {k: torch.zeros_like(v) for k, v in like.items()}


def add_params(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    """a + b, for the names of `a`."""
    return {k: v + b[k] for k, v in a.items()}


def subtract_params(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Params:
    """a - b, for the names of `a`."""
    if a and next(iter(a.values())).is_cuda:
        return dict(zip(a, subtract_each(list(a.values()), [b[k] for k in a])))
    return {k: v - b[k] for k, v in a.items()}


def scale_params(a: Mapping[str, Tensor], factor: float | Tensor) -> Params:
    """factor * a."""
    return {k: v * factor for k, v in a.items()}


def dot_params(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """The scalar product over all tensors of `a`."""
    return torch.stack([(v * b[k]).sum() for k, v in a.items()]).sum()


def select_params(a: Mapping[str, Tensor], names: Iterable[str]) -> Params:
    """The tensors of these names, as far as `a` has them."""
    return {k: a[k] for k in names if k in a}


def detach_params(a: Mapping[str, Tensor]) -> Params:
    """The same tensors cut off from autograd's graph."""
    return {k: v.detach() for k, v in a.items()}


def select_where(live: Tensor, new: Tree, old: Tree) -> Tree:
    """`new` where `live` is true, else `old`, tensor by tensor; it undoes padded steps."""
    return map_tensor_pairs(lambda n, o: torch.where(live, n, o), new, old)


def map_tensors(f: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The tree with `f` of each of its tensors."""
    if isinstance(tree, Tensor):
        return f(tree)
    if isinstance(tree, (dict, Mapping)):
        return {k: map_tensors(f, v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return rebuild_sequence(tree, (map_tensors(f, v) for v in tree))
    return tree


def rebuild_sequence(like: list | tuple, values: Iterable[Tree]) -> Tree:
    """A list, tuple or named tuple of the same class with other values."""
    make = getattr(like, "_make", type(like))
    return make(values)


def map_tensor_pairs(f: Callable[[Tensor, Tensor], Tensor], a: Tree, b: Tree) -> Tree:
    """The tree `a` with `f` of each of its tensors and the one in the same place of `b`."""
    if isinstance(a, Tensor):
        return f(a, b)
    if isinstance(a, Mapping):
        return {k: map_tensor_pairs(f, v, b[k]) for k, v in a.items()}
    if isinstance(a, (list, tuple)):
        return rebuild_sequence(a, (map_tensor_pairs(f, v, w) for v, w in zip(a, b, strict=True)))
    return a


def collect_tensors(tree: Tree) -> list[Tensor]:
    """Every tensor of a tree, in order."""
    tensors: list[Tensor] = []
    _append_tensors(tree, tensors)
    return tensors


def _append_tensors(tree: Tree, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, (dict, Mapping)):
        for v in tree.values():
            _append_tensors(v, tensors)
    elif isinstance(tree, (list, tuple)):
        for v in tree:
            _append_tensors(v, tensors)


def refill_tensors(tree: Tree, values: Iterable[Tensor]) -> Tree:
    """The same tree with other tensors, in the order of `collect_tensors`."""
    remaining = iter(values)
    return map_tensors(lambda _: next(remaining), tree)


def outline_tree(tree: Tree) -> Any:
    """Structure, shapes and types of a tree as a hashable value; trees with equal outlines can be stacked."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, (dict, Mapping)):
        return tuple([(k, outline_tree(v)) for k, v in tree.items()])
    if isinstance(tree, (list, tuple)):
        return tuple(outline_tree(v) for v in tree)
    return tree


def count_tree_bytes(tree: Tree) -> int:
    """The bytes of all tensors of a tree."""
    return sum(t.nbytes for t in collect_tensors(tree))


def is_tree_finite(tree: Tree) -> bool:
    """Whether all numbers of all tensors are finite."""
    # a finite sum is proof enough and cheaper; a sum that is not finite may be an overflow
    floats = [t for t in collect_tensors(tree) if t.is_floating_point()]
    return all(isfinite(t.sum().item()) or bool(t.isfinite().all()) for t in floats)


def check_each_finite(trees: Sequence[Tree]) -> list[bool]:
    """Whether each of several trees is finite; on a GPU with a single synchronisation for all of them."""
    floats = [[t for t in collect_tensors(tree) if t.is_floating_point() and t.numel()] for tree in trees]
    if not any(t.is_cuda for tensors in floats for t in tensors):
        return [is_tree_finite(tree) for tree in trees]
    flat = [t for tensors in floats for t in tensors]
    largest = compute_max_norms(flat)
    alike = len({(n.dtype, n.device) for n in largest}) == 1
    finite = iter(torch.stack(largest if alike else [n.double().cpu() for n in largest]).isfinite().tolist())
    return [all([next(finite) for _ in tensors]) for tensors in floats]


def is_same_tree(a: Tree, b: Tree) -> bool:
    """Whether two trees have the same structure, types and values."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(is_same_tree(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(is_same_tree(v, w) for v, w in zip(a, b))
    return type(a) is type(b) and a == b


def pack_tree(tree: Tree) -> tuple[Any, Params]:
    """A tree as a JSON value plus tensors by number, which a checkpoint stores instead of a pickle."""
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
    """The tree that `pack_tree` packed."""
    if not isinstance(plain, dict):
        return plain
    (kind, content), *rest = plain.items()
    if rest:
        raise ValueError("a node of a stored tree has more than one kind")
    match kind:
        case "tensor":
            return flat[content]
        case "dict":
            return {k: unpack_tree(v, flat) for k, v in content}
        case "list":
            return [unpack_tree(v, flat) for v in content]
        case "tuple":
            return tuple(unpack_tree(v, flat) for v in content)
    raise ValueError(f"a node of a stored tree is of an unknown kind, {kind!r}")
