"""Sequences of unequal length, padded to the longest, with a mask that says which positions are there."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.data.user_split import make_data_error

PADDED_NAMES = {True: "input_ids", False: "values"}
"""What padded sequences are called in a dict of inputs: token numbers, or measurements."""
MASK = "attention_mask"
"""1 at the positions of a sequence, 0 where it was padded."""


def pad_sequences(sequences: Sequence[Any], what: str, length: int = 0) -> dict[str, Tensor]:
    """Padded sequences (N, longest, ...) of zeros and values, and their mask (N, longest), as a dict of inputs.

    `length` is the least length to pad to. Whole numbers become `input_ids`, other numbers `values`.
    """
    try:
        arrays = [np.asarray(own) for own in sequences]
    except (ValueError, TypeError):
        raise make_data_error(f"The {what} holds sequences of unequal depth.", "Give lists of numbers.") from None
    odd = next((i for i, own in enumerate(arrays) if own.size and own.dtype.kind not in "biuf"), None)
    if odd is not None:
        raise make_data_error(
            f"Sequence {odd} of {what} holds {arrays[odd].dtype}, not numbers.", "Turn words into numbers first."
        )
    lengths = np.array([len(own) for own in arrays])
    if not lengths.all():
        empty = int((lengths == 0).nonzero()[0][0])
        raise ShoalError("no-data", f"Sequence {empty} of {what} is empty.", "Drop the sample.")
    forms = {own.shape[1:] for own in arrays}
    if len(forms) > 1:
        raise make_data_error(f"The sequences of {what} differ in more than their length.", "Make their steps alike.")
    whole = all(own.dtype.kind in "biu" for own in arrays)
    shape = (len(arrays), max(int(lengths.max()), length), *forms.pop())
    padded = np.zeros(shape, np.int64 if whole else np.float32)
    for row, own in zip(padded, arrays):
        row[: len(own)] = own
    mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
    return {PADDED_NAMES[whole]: torch.from_numpy(padded), MASK: torch.from_numpy(mask)}


def pad_to_length(inputs: Any, length: int) -> Any:
    """A dict of padded sequences, padded further to this length; other inputs stay as they are."""
    if not isinstance(inputs, dict) or MASK not in inputs or inputs[MASK].dim() != 2:
        return inputs
    now = inputs[MASK].shape[1]

    def widen(value: Tensor) -> Tensor:
        if now >= length or value.dim() < 2 or value.shape[1] != now:
            return value
        return torch.cat((value, value.new_zeros(len(value), length - now, *value.shape[2:])), 1)

    return {name: widen(value) for name, value in inputs.items()}
