"""Feature maps as they were before pooling and flattening, seen at the input of the next layer.

Methods that rank filters need the maps at full resolution.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INPUT_TAP_PREFIX = "into "
"""A tap with this prefix is the input of a layer and not its output: `into conv2`."""
SOURCE_ATTRIBUTE = "_before_pooling"


class TrackPoolingInputs(TorchFunctionMode):
    """While it is active, a tensor that was computed from a single tensor of another shape remembers that tensor.

    Pooling, means over positions, flattening and slicing change the shape; activations, norms and sums keep it. So it
    does not matter whether a model calls layers or functions.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        inputs = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        if isinstance(output, Tensor):
            if any(output is value for value in inputs):  # changed in its place
                vars(output).pop(SOURCE_ATTRIBUTE, None)
            elif len(inputs) == 1 and output.shape != inputs[0].shape:
                setattr(output, SOURCE_ATTRIBUTE, find_unpooled_map(inputs[0]))
        return output


def find_unpooled_map(x: Tensor) -> Tensor:
    """The tensor that this one was pooled, flattened or sliced from; itself where it was not."""
    return getattr(x, SOURCE_ATTRIBUTE, x)


def make_input_hook(cell: list[dict], name: str) -> Callable[..., None]:
    """A forward pre-hook that stores the input of a layer's first call in `cell[0][name]`, before pooling."""

    def record_input(_layer: nn.Module, args: tuple, kwargs: dict) -> None:
        cell[0].setdefault(name, find_unpooled_map(args[0] if args else next(iter(kwargs.values()))))

    return record_input
