"""Checks that the tensors and layers that a net names (roles, axes, head) are in its module, against misspelt names."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from shoal.core.errors import ShoalError
from shoal.core.model.plan import Axis

ROLES = ("shared", "personal", "server", "frozen")


def check_net_names(
    roles: Mapping[str, str],
    axes: Iterable[Axis],
    head: str,
    tensors: Collection[str],
    layers: Collection[str],
    ties: Mapping[str, str],
) -> None:
    """Raise where a role is unknown, or a tensor with a role, a tensor of an axis, or the head is not in the model.

    A tensor with several names has its role by the first of them.
    """
    for tensor, role in roles.items():
        require_name(tensor, tensors, f"The model's roles name the tensor {tensor!r}")
        require_name(role, ROLES, f"The tensor {tensor!r} has the role {role!r}")
        if tensor in ties:
            problem = (
                f"The model's roles name {tensor!r}, which is one tensor with {ties[tensor]!r} and goes by that name."
            )
            raise ShoalError("bad-part", problem, f"Give the role to {ties[tensor]!r}.")
    for axis in axes:
        for cut in axis.cuts:
            require_name(cut.tensor, tensors, f"The axis {axis.name!r} cuts the tensor {cut.tensor!r}")
    require_name(head, layers, f"The model's head is the layer {head!r}")


def require_name(name: object, known: Collection[str], found: str) -> None:
    if name in known:
        return
    near = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(map(repr, list(known)[:8]))}."
    raise ShoalError("bad-part", f"{found}, and there is none of that name.", hint)
