"""How a module is given inputs that are several tensors: as one dict or tuple, by the names of its arguments, or in
their order."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.core.model.inputs import Inputs


def find_call_form(module: nn.Module, inputs: Inputs | None) -> str:
    """`one`, `names` or `order`: how the forward of a module takes these inputs.

    It gets a dict or tuple as one argument where it takes one. With `forward(self, image, table)` each argument gets
    the tensor of its name, or, of a tuple, the one in its place.
    """
    if inputs is None or isinstance(inputs, Tensor):
        return "one"
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return "one"
    if isinstance(inputs, Mapping) and len(inputs) > 1 and set(inputs) <= set(signature.parameters):
        return "names"
    if can_bind(signature, inputs):
        return "one"
    if isinstance(inputs, tuple):
        return "order" if can_bind(signature, *inputs) else "one"
    return "names" if can_bind(signature, **inputs) else "one"


def can_bind(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    """Whether a function of this signature can be called so."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def call_module(module: nn.Module, inputs: Inputs, form: str) -> Any:
    """What a module returns for inputs, given in a form of `find_call_form`."""
    if form == "names":
        return module(**inputs)
    return module(*inputs) if form == "order" else module(inputs)
