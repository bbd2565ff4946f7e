"""Arrays that stay in their files: read where a batch needs them, so that a data set may be larger than memory."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.core.model.inputs import Inputs
from shoal.data.dataset import Dataset
from shoal.data.user_split import make_data_error

LEFT_ON_DISK = 2**28
"""Bytes of mapped inputs above which they are neither converted nor copied."""


class MappedTensors(dict[str, Any]):
    """A dict of x and y whose tensors are mapped from a file."""


def is_mapped(data: Any) -> bool:
    """Whether the inputs of a user's data are arrays in files."""
    if isinstance(data, MappedTensors):
        return True
    x = data.get("x") if isinstance(data, dict) else data[0] if isinstance(data, tuple) and data else None
    values = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else [x]
    return bool(values) and all(isinstance(value, np.memmap) for value in values)


def stays_on_disk(dataset: Dataset) -> bool:
    """Whether a data set is mapped, and so large that it is not copied into memory."""
    return dataset.mapped and tree.count_tree_bytes([dataset.inputs, dataset.test_inputs]) > LEFT_ON_DISK


def count_gigabytes(inputs: Inputs) -> str:
    return f"{tree.count_tree_bytes(inputs) / 1e9:.1f} GB"


def take_slice(inputs: Inputs, rows: Tensor) -> Inputs:
    """Samples that lie beside each other, not copied; others are refused."""
    first, last = int(rows[0]), int(rows[-1])
    if not torch.equal(rows, torch.arange(first, last + 1)):
        raise make_data_error(
            f"Samples cannot be held back at random from {count_gigabytes(inputs)} of mapped inputs: that would copy "
            "them into memory.",
            "Write a test half beside them (test_x, test_y), or shuffle them and give their numbers as `order`, of "
            "which the last are held back.",
        )
    return tree.map_tensors(lambda t: t[first : last + 1], inputs)
