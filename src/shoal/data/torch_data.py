"""Torch data sets of map style: every sample is asked for once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, concat_inputs, outline_sample
from shoal.data.frames import convert_image
from shoal.data.sequences import MASK, pad_sequences
from shoal.data.user_split import UserSamples, convert_inputs, convert_tensor, make_data_error

LABEL_KEYS = ("labels", "label", "target", "y")
"""What the target is called in samples that are dicts."""


def read_torch_dataset(data: Any) -> UserSamples:
    """A torch data set that knows its length and gives (x, y) for each index; sequences in x may differ in length.

    Names of classes are read from its attribute `classes`, as torchvision has it.
    """
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        raise make_data_error(
            "The torch data set has no length.", "Give one of map style, with __len__ and __getitem__."
        )
    if not len(data):
        raise ShoalError("no-data", "The torch data set is empty.", "Give at least one sample.")
    xs, ys = [], []
    for i in range(len(data)):
        sample = separate_label(data[i])
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise make_data_error(f"Sample {i} of the torch data set is not a pair (x, y).", "Let it give pairs.")
        x, y = sample
        if hasattr(x, "getbands"):  # an image of Pillow
            x = convert_image(x)
        xs.append(tree.map_tensors(lambda t: t[None], convert_inputs(x, f"x of sample {i}")))
        ys.append(y if isinstance(y, str) else convert_tensor(y, f"y of sample {i}")[None])
    named = read_class_names(data)
    texts = isinstance(ys[0], str)
    odd = next((i for i, y in enumerate(ys) if isinstance(y, str) != texts), None)
    if odd is not None:
        raise make_data_error(f"The y of sample {odd} is no text like the first, or the reverse.", "Make them alike.")
    if not texts:
        refuse_unlike_samples("y", ys)
    if has_unequal_lengths(xs):
        inputs = pad_sequences([x[0].numpy() for x in xs], "the torch data set")
    elif all(isinstance(x, dict) and x.keys() == xs[0].keys() for x in xs):
        inputs = join_named_tensors(xs)
    else:
        refuse_unlike_samples("x", xs)
        inputs = concat_inputs(xs)
    return UserSamples(inputs, ys if texts else torch.cat(ys), class_names=() if texts else named)


def refuse_unlike_samples(what: str, values: list[Any]) -> None:
    forms = [outline_sample(value) for value in values]
    odd = [i for i, form in enumerate(forms) if form != forms[0]]
    if odd:
        raise make_data_error(
            f"The {what} of sample {odd[0]} differs in shape or type from the first.", "Make them alike."
        )


def separate_label(sample: Any) -> Any:
    """A dict of tensors with its label among them, as tokenised data sets give it, as a pair; others as they are."""
    if not isinstance(sample, Mapping):
        return sample
    name = next((name for name in LABEL_KEYS if name in sample), None)
    return sample if name is None else ({key: own for key, own in sample.items() if key != name}, sample[name])


def join_named_tensors(xs: list[dict[str, Tensor]]) -> Inputs:
    """All samples by the names of their tensors; those that are sequences of unequal length are padded, with a mask."""
    joined: dict[str, Tensor] = {}
    masked: Tensor | None = None
    for name in xs[0]:
        own = [x[name] for x in xs]
        if not has_unequal_lengths(own):
            refuse_unlike_samples(f"x, {name},", own)
            joined[name] = torch.cat(own)
            continue
        joined[name], mask = pad_sequences([value[0].numpy() for value in own], name).values()
        if MASK not in xs[0] and (masked is None or not torch.equal(masked, mask)):
            joined[MASK if masked is None else f"{name}_mask"] = mask
            masked = mask
    return joined


def has_unequal_lengths(xs: list[Any]) -> bool:
    """Whether samples are sequences of whole numbers, or of rows of real ones, that differ in length alone."""
    kinds = {(x.dim(), x.dtype, x.shape[2:]) if isinstance(x, Tensor) else None for x in xs}
    if kinds != {(2, torch.int64, ())} and {kind and kind[:2] for kind in kinds} != {(3, torch.float32)}:
        return False
    return len(kinds) == 1 and len({x.shape[1] for x in xs}) > 1


def read_class_names(data: Any) -> tuple[str, ...]:
    names = getattr(data, "classes", None)
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    return ()
