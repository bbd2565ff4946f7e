"""Checks of what parts return on the server, in every round: types, names, shapes, ranges."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.plan import Plan, Slicer
from shoal.core.part import Part
from shoal.core.types import Reply


def broken_rule_error(part: Part, point: str, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"The part {part.name()} breaks a rule at {point}: it {why}.", advice)


def check_two_values(part: Part, point: str, returned: Any) -> None:
    """Raise unless a part returned a value and a state."""
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise broken_rule_error(part, point, "does not return two values", "Return the value and the state.")


def check_params(part: Part, point: str, expected: Mapping[str, Tensor], returned: Any) -> None:
    """Raise unless the returned model has the tensors of the given one: names, shapes, types, compute device."""
    if not isinstance(returned, Mapping):
        why = f"returns {type(returned).__name__} where a model is wanted"
        raise broken_rule_error(part, point, why, "Return a dict with a tensor for every name.")
    for name, value in expected.items():
        tensor = returned.get(name)
        if not isinstance(tensor, Tensor) or tensor.shape != value.shape:
            shape = (
                tuple(tensor.shape) if isinstance(tensor, Tensor) else "nothing" if tensor is None else str(tensor)[:40]
            )
            why = f"returns {shape} for {name}, which has shape {tuple(value.shape)}"
            raise broken_rule_error(part, point, why, "Return a tensor of the same shape for every name.")
        if tensor.dtype != value.dtype or tensor.device != value.device:
            one, other = (f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (tensor, value))
            why = f"returns {one} for {name}, which is {other}"
            raise broken_rule_error(part, point, why, f"Bring it back: made.to(given[{name!r}]).")
    if len(returned) > len(expected):
        extra = next(str(name) for name in returned if name not in expected)
        raise broken_rule_error(
            part, point, f"returns {extra[:80]}, which the model does not have", "Return the same names."
        )


def check_replies(part: Part, given: Sequence[Reply], returned: Any) -> None:
    """Raise unless what is returned are some of the replies, each once, with deltas of the same names and shapes."""
    if not isinstance(returned, (list, tuple)) or not all(isinstance(reply, Reply) for reply in returned):
        why = f"returns {type(returned).__name__} where replies are wanted"
        raise broken_rule_error(part, "sift", why, "Return a list of replies.")
    by_device = {reply.device: reply for reply in given}
    if len({reply.device for reply in returned} & by_device.keys()) < len(returned):
        why = "returns a reply twice, or one that it was not given"
        raise broken_rule_error(part, "sift", why, "Return some of the replies, each once.")
    for reply in returned:
        if reply.delta is not by_device[reply.device].delta:
            check_params(part, "sift", by_device[reply.device].delta, reply.delta)


def check_weights(part: Part, given: Tensor, returned: Any) -> None:
    """Raise unless there is one finite weight from 0 up for each reply."""
    if not isinstance(returned, Tensor) or returned.shape != given.shape:
        found = f"weights of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        why = f"returns {found} for {len(given)} replies"
        raise broken_rule_error(part, "weigh", why, "Return one number for each reply.")
    if not bool((returned.isfinite() & (returned >= 0)).all()):
        why = f"returns the weights {str(returned.tolist())[:80]}"
        raise broken_rule_error(part, "weigh", why, "Weights are finite numbers from 0 up.")


def check_plan(part: Part, returned: Any, slicer: Slicer) -> None:
    """Raise unless a plan to prune keeps units that the axes of the model have, at least one of each axis it names."""
    if not isinstance(returned, Plan):
        raise broken_rule_error(part, "prune", f"returns {type(returned).__name__}", "Return a Plan.")
    for axis, units in returned.kept.items():
        if axis not in slicer.axes:
            raise broken_rule_error(
                part, "prune", f"keeps units of {axis!r}, which is no axis", "Use those of `round.net.axes`."
            )
        size, is_list = slicer.axes[axis].size, isinstance(units, Tensor) and units.dim() == 1 and len(units) > 0
        if not is_list or units.is_floating_point() or int(units.min()) < 0 or int(units.max()) >= size:
            why = f"keeps of the axis {axis} what are not some of its {size} units"
            raise broken_rule_error(part, "prune", why, "Give their numbers in rising order.")
