"""The form of what parts return on the server: looked at in every round, on the model of the run."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.plan import Plan, Slicer
from shoal.core.part import Part


def broken_rule_error(part: Part, point: str, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"The part {part.name()} breaks a rule at {point}: it {why}.", advice)


def check_two_values(part: Part, point: str, returned: Any) -> None:
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise broken_rule_error(part, point, "does not return two values", "Return the value and the state.")


def check_params(part: Part, point: str, given: Mapping[str, Tensor], made: Any) -> None:
    """A model must have the tensors of the one that was given: names, shapes, types, and where they are."""
    if not isinstance(made, Mapping):
        why = f"returns {type(made).__name__} where a model is wanted"
        raise broken_rule_error(part, point, why, "Return a dict with a tensor for every name.")
    for name, value in given.items():
        found = made.get(name)
        if not isinstance(found, Tensor) or found.shape != value.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else "nothing" if found is None else str(found)[:40]
            why = f"returns {shape} for {name}, which has shape {tuple(value.shape)}"
            raise broken_rule_error(part, point, why, "Return a tensor of the same shape for every name.")
        if found.dtype != value.dtype or found.device != value.device:
            one, other = (f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (found, value))
            why = f"returns {one} for {name}, which is {other}"
            raise broken_rule_error(part, point, why, f"Bring it back: made.to(given[{name!r}]).")
    if len(made) > len(given):
        new = next(str(name) for name in made if name not in given)
        raise broken_rule_error(
            part, point, f"returns {new[:80]}, which the model does not have", "Return the same names."
        )


def check_weights(part: Part, given: Tensor, made: Any) -> None:
    if not isinstance(made, Tensor) or made.shape != given.shape:
        found = f"weights of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
        why = f"returns {found} for {len(given)} replies"
        raise broken_rule_error(part, "weigh", why, "Return one number for each reply.")
    if not bool((made.isfinite() & (made >= 0)).all()):
        why = f"returns the weights {str(made.tolist())[:80]}"
        raise broken_rule_error(part, "weigh", why, "Weights are finite numbers from 0 up.")


def check_plan(part: Part, made: Any, slicer: Slicer) -> None:
    """What is kept of a model must be units of its axes."""
    if not isinstance(made, Plan):
        raise broken_rule_error(part, "prune", f"returns {type(made).__name__}", "Return a Plan.")
    for axis, units in made.kept.items():
        if axis not in slicer.axes:
            raise broken_rule_error(
                part, "prune", f"keeps units of {axis!r}, which is no axis", "Use those of `round.net.axes`."
            )
        size, numbers = slicer.axes[axis].size, isinstance(units, Tensor) and units.dim() == 1 and len(units) > 0
        if not numbers or units.is_floating_point() or int(units.min()) < 0 or int(units.max()) >= size:
            why = f"keeps of the axis {axis} what are not some of its {size} units"
            raise broken_rule_error(part, "prune", why, "Give their numbers in rising order.")
