"""Warnings about data that can be trained on but are probably not what was meant, one line each."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shoal.core.model import tree
from shoal.core.model.inputs import list_shapes
from shoal.data.dataset import Dataset

CHANNEL_COUNTS = (1, 3, 4)
"""How many channels pictures have."""
MAX_SHOWN = 8
MAX_ROWS = 1000
LARGE_INPUT = 100.0
"""Inputs beyond this are told of."""
MAX_LOOKED_AT = 100_000
"""How many targets are looked at."""

Doubt = tuple[str, tuple[Any, ...]]
"""A wording with places for values, and the values."""


def find_doubts(dataset: Dataset, sizes: np.ndarray) -> Iterator[Doubt]:
    """What is odd about a data set and about the number of samples of each device, where the sizes are known."""
    for remark in dataset.remarks:
        yield remark.replace("%", "%%"), ()
    yield from find_class_doubts(dataset)
    yield from find_number_doubts(dataset)
    for shape in list_shapes(dataset.input_shape):
        yield from find_channel_doubts(shape)
    yield from find_range_doubts(dataset)
    samples = int(sizes.sum())
    if 0 < samples < len(sizes):
        text = "There are %d devices for %d samples: at least %d devices have none and never take part."
        yield text + " Give fewer devices if that is not meant.", (len(sizes), samples, len(sizes) - samples)


def find_class_doubts(dataset: Dataset) -> Iterator[Doubt]:
    """Classes without a sample; of sequences, whose targets are words, not every word has to come up."""
    if dataset.targets.dim() > 1 or dataset.targets.is_floating_point():
        return
    trained, tested = (
        torch.bincount(y.cpu(), minlength=dataset.classes) > 0 for y in (dataset.targets, dataset.test_targets)
    )
    nowhere, untaught = (~trained & ~tested).nonzero().flatten(), (tested & ~trained).nonzero().flatten()
    if len(nowhere):
        first = int((trained | tested).nonzero()[0])
        cure = f"subtract {first} from every label" if len(nowhere) == first else "number the labels 0, 1, 2 and so on"
        cure += ", or say task = regress where they are amounts" if 2 * len(nowhere) > dataset.classes else ""
        text = "%d of %d classes have no sample (%s): classes are counted from 0 to the largest label. If that is not "
        yield text + "meant, %s.", (len(nowhere), dataset.classes, format_first_numbers(nowhere), cure)
    if int(trained.sum()) == 1 < len(dataset.targets):
        text = "All %d training samples are of class %d: there is nothing to tell apart. If that is not meant, look at "
        yield text + "the labels.", (len(dataset.targets), int(trained.nonzero()[0]))
    if len(untaught):
        text = "%d of %d classes are tested and have no sample to train on (%s). If that is not meant, look at how "
        yield text + "the data were divided.", (len(untaught), dataset.classes, format_first_numbers(untaught))


def find_range_doubts(dataset: Dataset) -> Iterator[Doubt]:
    """Inputs of a large range, such as pixels that are floating point numbers up to 255; some rows are looked at."""
    for x in tree.collect_tensors(dataset.inputs):
        if not x.is_floating_point():
            continue
        some = x[:: max(1, len(x) // MAX_ROWS)]
        high = float(some.abs().max()) if some.numel() else 0.0
        if high > LARGE_INPUT:
            pixels = high <= 255 and float(some.min()) >= 0 and bool((some == some.round()).all())
            cure = "divide them by 255, or give them as bytes" if pixels else "use normalise"
            text = "Inputs have values up to %g, which most models cannot learn from. If that is not meant, %s."
            yield text, (high, cure)


def find_number_doubts(dataset: Dataset) -> Iterator[Doubt]:
    """Large numbers to predict, and few whole numbers that are learnt as real ones, because they are stored as such."""
    y = dataset.targets
    if not y.is_floating_point():
        return
    high = float(y[:MAX_LOOKED_AT].abs().max()) if y.numel() else 0.0
    if high > LARGE_INPUT:
        text = (
            "Targets have values up to %g, whose squared errors make steps so large that training often fails. If it "
        )
        yield text + "does, divide them by a number such as %g, or use a small lr.", (high, 10 ** int(np.log10(high)))
    if y.dim() > 1:
        return
    values = y[:MAX_LOOKED_AT].unique()
    if 2 < len(values) <= MAX_SHOWN and bool((values == values.round()).all()) and float(values.min()) >= 0:
        text = (
            "The targets are real numbers with %d values (%s), which are learnt as amounts. If they are classes, give "
        )
        yield text + "them as whole numbers.", (len(values), format_first_numbers(values.long()))


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
