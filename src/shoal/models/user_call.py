"""Calls what a user's file defines as a model, with the arguments that it accepts."""

import inspect
import logging
from typing import Any

from shoal.core.errors import ShoalError, describe_error
from shoal.core.model.inputs import InputShape

log = logging.getLogger("shoal")


def call_model_maker(spec: str, thing: Any, input_shape: InputShape, classes: int) -> Any:
    """What a user's class or function returns, called with the input shape and the classes as far as it takes them."""
    if not callable(thing):
        raise make_model_error(spec, "it is no class and no function", "Name what makes the model.")
    try:
        takes = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        takes = ()
    offered = {"input_shape": input_shape, "classes": classes, "num_classes": classes, "outputs": classes}
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    given = {p.name: offered[p.name] for p in takes if p.name in offered and p.kind not in fixed}
    needed = [p for p in takes if p.default is p.empty and p.kind not in fixed[:2]]
    by_name = all(p.name in given for p in needed)
    values = (input_shape, classes)[2 - min(len(needed), 2) :]
    swapped = any(given.get(p.name, value) != value for p, value in zip(needed, values))
    if len(needed) > 2 or (swapped and not by_name):
        why = f"it wants {len(needed)} values ({', '.join(p.name for p in needed)})"
        raise make_model_error(spec, why, "Let it take (input_shape, classes), (classes) or nothing.")
    if not by_name and any(p.name not in offered for p in needed):
        meanings = ("the shape of one input", "the number of classes")[2 - len(values) :]
        told = " and ".join(f"{p.name} = {v}, {what}" for p, v, what in zip(needed, values, meanings))
        log.info("%s gets %s: give what is something else a default, or call these input_shape and classes", spec, told)
    try:
        return thing(**given) if by_name else thing(*values)
    except (Exception, SystemExit) as error:
        raise make_model_error(
            spec, f"it raises {describe_error(error)} when it is made", "Correct it there."
        ) from error


def make_model_error(source: object, why: str, advice: str) -> ShoalError:
    """The error that refuses a user's model."""
    return ShoalError("bad-part", f"{source} cannot be used: {why}.", advice)
