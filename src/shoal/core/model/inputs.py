"""What a model takes: one tensor, or a dict or tuple of tensors, all with the samples as first dimension."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.core.model import tree

Inputs: TypeAlias = Any
"""One tensor, or a dict or tuple of tensors, all with the samples as first dimension."""
InputShape: TypeAlias = Any
"""The shape of one sample, or a dict or tuple of shapes."""


def count_samples(inputs: Inputs) -> int:
    """How many samples the inputs have."""
    return len(inputs) if isinstance(inputs, Tensor) else len(tree.collect_tensors(inputs)[0])


def take_rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """The samples with these numbers, copied."""
    if isinstance(inputs, Tensor):
        return inputs.index_select(0, rows)
    return tree.map_tensors(lambda t: t.index_select(0, rows), inputs)


def scale_pixels(inputs: Inputs) -> Inputs:
    """Pixels that stayed bytes, because they are mapped from a disk, as numbers from 0 to 1; others as they are."""
    return tree.map_tensors(lambda t: t.to(torch.float32) / 255 if t.dtype == torch.uint8 else t, inputs)


def concat_inputs(pieces: Sequence[Inputs]) -> Inputs:
    """The samples of several inputs of one form, one after the other."""
    own = zip(*(tree.collect_tensors(piece) for piece in pieces), strict=True)
    return tree.refill_tensors(pieces[0], (torch.cat(tensors) for tensors in own))


def get_input_shape(inputs: Inputs) -> InputShape:
    """The shape of one sample, or a dict or tuple of shapes."""
    if isinstance(inputs, Tensor):
        return tuple(inputs.shape[1:])
    if isinstance(inputs, dict):
        return {name: tuple(value.shape[1:]) for name, value in inputs.items()}
    return tuple(tuple(value.shape[1:]) for value in inputs)


def list_shapes(shape: InputShape) -> list[tuple[int, ...]]:
    """The shape of each tensor of a sample."""
    if isinstance(shape, dict):
        return list(shape.values())
    return list(shape) if shape and isinstance(shape[0], tuple) else [shape]


def make_example(inputs: Inputs) -> Inputs | None:
    """One sample of zeros in the form of a dict or tuple of tensors; None where inputs are one tensor."""
    if isinstance(inputs, Tensor):
        return None
    return tree.map_tensors(lambda t: torch.zeros_like(t[:1], device="cpu"), inputs)


def repeat_example(example: Inputs, count: int, dtype: torch.dtype, place: torch.device) -> Inputs:
    """So many copies of the one sample of an example; real numbers of this type, whole numbers as they are."""

    def repeat_values(value: Tensor) -> Tensor:
        return value.to(place, dtype if value.is_floating_point() else value.dtype).repeat_interleave(count, 0)

    return tree.map_tensors(repeat_values, example)


def outline_sample(inputs: Inputs) -> Any:
    """Structure, shapes and types of one sample as a hashable value."""
    if isinstance(inputs, dict):
        return "dict", tuple((name, tuple(value.shape[1:]), value.dtype) for name, value in inputs.items())
    values = (inputs,) if isinstance(inputs, Tensor) else inputs
    return type(inputs) is tuple, tuple((tuple(value.shape[1:]), value.dtype) for value in values)


def describe_inputs(inputs: Inputs) -> str:
    """The shape and type of one sample, for messages."""
    if isinstance(inputs, Tensor):
        return f"{tuple(inputs.shape[1:])} {inputs.dtype}"
    if isinstance(inputs, dict):
        return f"a dict ({', '.join(f'{name}: {describe_inputs(value)}' for name, value in inputs.items())})"
    return f"a tuple ({', '.join(map(describe_inputs, inputs))})"
