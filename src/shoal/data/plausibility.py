"""Warnings about data that can be trained on but are probably not what was meant, one line each."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shoal.core.model.inputs import list_shapes
from shoal.data.dataset import Dataset

CHANNEL_COUNTS = (1, 3, 4)
"""How many channels pictures have."""
MAX_SHOWN = 8

Doubt = tuple[str, tuple[Any, ...]]
"""A wording with places for values, and the values."""


def find_doubts(dataset: Dataset, sizes: np.ndarray) -> Iterator[Doubt]:
    """What is odd about a data set and about the number of samples of each device, where the sizes are known."""
    yield from find_class_doubts(dataset)
    for shape in list_shapes(dataset.input_shape):
        yield from find_channel_doubts(shape)
    samples = int(sizes.sum())
    if 0 < samples < len(sizes):
        text = "There are %d devices for %d samples: at least %d devices have none and never take part."
        yield text + " Give fewer devices if that is not meant.", (len(sizes), samples, len(sizes) - samples)


def find_class_doubts(dataset: Dataset) -> Iterator[Doubt]:
    """Classes without a sample; of sequences, whose targets are words, not every word has to come up."""
    if dataset.targets.dim() > 1:
        return
    trained, tested = (
        torch.bincount(y.cpu(), minlength=dataset.classes) > 0 for y in (dataset.targets, dataset.test_targets)
    )
    nowhere, untaught = (~trained & ~tested).nonzero().flatten(), (tested & ~trained).nonzero().flatten()
    if len(nowhere):
        first = int((trained | tested).nonzero()[0])
        cure = f"subtract {first} from every label" if len(nowhere) == first else "number the labels 0, 1, 2 and so on"
        text = "%d of %d classes have no sample (%s): classes are counted from 0 to the largest label. If that is not "
        yield text + "meant, %s.", (len(nowhere), dataset.classes, format_first_numbers(nowhere), cure)
    if len(untaught):
        text = "%d of %d classes are tested and have no sample to train on (%s). If that is not meant, look at how "
        yield text + "the data were divided.", (len(untaught), dataset.classes, format_first_numbers(untaught))


def find_channel_doubts(shape: tuple[int, ...]) -> Iterator[Doubt]:
    """A warning about images whose channels come last, as most programs outside PyTorch store them."""
    if (
        len(shape) == 3
        and shape[2] in CHANNEL_COUNTS
        and shape[0] not in CHANNEL_COUNTS
        and shape[1] > max(CHANNEL_COUNTS)
    ):
        text = "Inputs of shape %s are read as %d channels of %d x %d. If the last number is that of the colours, put "
        yield text + "it first: x.permute(0, 3, 1, 2).", (shape, *shape)


def format_first_numbers(numbers: torch.Tensor) -> str:
    """The first few of many numbers, with dots where there are more."""
    shown = ", ".join(map(str, numbers[:MAX_SHOWN].tolist()))
    return shown if len(numbers) <= MAX_SHOWN else f"{shown}, ..."
