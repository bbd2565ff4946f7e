"""What a module returns: a tensor, or a dict or an object of which one tensor is the model's outputs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.core.model.module_call import call_module

OUTPUT_KEYS = ("logits", "output", "outputs", "prediction", "predictions")
"""Keys, and names of attributes, under which a module's outputs are looked for; the first that is there counts."""


def read_logits(returned: Any) -> Tensor:
    """The model's outputs: the tensor that a module returns, or the one in a dict or an object (`.logits`).

    A TypeError says what was found where there is none.
    """
    if isinstance(returned, Tensor):
        return returned
    for key in OUTPUT_KEYS:
        found = returned.get(key) if isinstance(returned, Mapping) else getattr(returned, key, None)
        if isinstance(found, Tensor):
            return found
    tensors = (
        [value for value in returned.values() if isinstance(value, Tensor)] if isinstance(returned, Mapping) else []
    )
    if len(tensors) == 1:
        return tensors[0]
    kind = "nothing" if returned is None else f"a {type(returned).__name__}"
    keys = f" with {', '.join(map(str, returned))}"[:80] if isinstance(returned, Mapping) else ""
    raise TypeError(f"it returns {kind}{keys} and no tensor")


class LogitsModel(nn.Module):
    """A module as one that takes a dict or tuple of inputs and returns its outputs alone."""

    def __init__(self, model: nn.Module, call_form: str = "one"):
        super().__init__()
        self.model, self.call_form = model, call_form

    def forward(self, inputs: Any) -> Tensor:
        return read_logits(call_module(self.model, inputs, self.call_form))
