"""What a layer reads, as it was before pooling and flattening: the maps that filters are judged by."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

INPUT_TAP_PREFIX = "into "
"""A tap that starts so is what a layer reads and not what it puts out: `into conv2`."""
SOURCE_ATTRIBUTE = "_before_pooling"


class TrackPoolingInputs(TorchFunctionMode):
    """While it is active, a tensor that was made from another one alone, with another shape, remembers that one.

    Pooling, means over positions, flattening and slices are such; activations, norms and sums keep the shape. So it
    does not matter whether a forward calls layers or functions, nor what they are called.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)]
        if isinstance(made, Tensor):
            if any(made is value for value in given):  # changed in its place
                vars(made).pop(SOURCE_ATTRIBUTE, None)
            elif len(given) == 1 and made.shape != given[0].shape:
                setattr(made, SOURCE_ATTRIBUTE, find_unpooled_map(given[0]))
        return made


def find_unpooled_map(x: Tensor) -> Tensor:
    """The maps that a tensor was pooled, flattened or cut from; itself where it was not."""
    return getattr(x, SOURCE_ATTRIBUTE, x)


def make_input_hook(cell: list[dict], name: str) -> Callable[..., None]:
    """A hook that notes what a layer is given in its first call."""

    def record_input(_layer: nn.Module, args: tuple, named: dict) -> None:
        cell[0].setdefault(name, find_unpooled_map(args[0] if args else next(iter(named.values()))))

    return record_input
