"""A data set: training and test samples as plain tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, InputShape, describe_inputs, get_input_shape
from shoal.core.short_repr import cut_text
from shoal.data.row_encoding import TableEncoding


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs (samples first: measurements, pixels as bytes, or word numbers) and targets.

    Inputs are one tensor, or a dict or tuple of tensors where a sample has several. Targets are numbers of classes, for
    sequences one per position, and `classes` is the size of the vocabulary where these are the next words; or real
    numbers, one or a row per sample; or rows of 0 and 1 where a sample has any number of labels.
    """

    name: str
    inputs: Inputs
    targets: Tensor
    test_inputs: Inputs
    test_targets: Tensor
    classes: int
    owners: np.ndarray | None = None
    """The device that each training sample belongs to, from 0 up, where the data itself says so."""
    task: str = ""
    """The name of the learning task that the targets are for, where the data say so."""
    class_names: tuple[str, ...] = ()
    """What the classes are called, in the order of their numbers, where they have names."""
    order: np.ndarray | None = None
    """When each training sample was taken, the newest largest, where the data itself says so."""
    mapped: bool = False
    """Whether inputs are arrays in files, which are read where they are needed."""
    remarks: tuple[str, ...] = ()
    """What its reader found that is probably not meant, to be told before a run."""
    test_owners: np.ndarray | None = None
    """The device that each test sample belongs to, where the data itself says so; -1 where it is none's."""
    final_inputs: Inputs | None = None
    """The test half, where validation samples have taken its place and it is judged beside them."""
    final_targets: Tensor | None = None
    encoding: TableEncoding | None = None
    """How the columns of a table became the inputs, where they are numbers, dates and categories alone."""

    def __repr__(self) -> str:
        owners = "" if self.owners is None else f", of {len(np.unique(self.owners))} owners"
        samples = f"{len(self.targets):,} training and {len(self.test_targets):,} test samples{owners}"
        return f"Dataset({self.name}: {samples}, inputs {cut_text(str(self.input_shape))}, {self.classes} classes)"

    @property
    def input_shape(self) -> InputShape:
        return get_input_shape(self.inputs)

    @property
    def words(self) -> int:
        """How many words the inputs have numbers for, where they are one tensor of whole numbers; else 0."""
        halves = (self.inputs, self.test_inputs, self.final_inputs)
        words = [x for x in halves if isinstance(x, Tensor) and x.dtype == torch.int64 and x.numel()]
        return max((int(x.max()) + 1 for x in words), default=0)

    def find_moments(self, given: str = "") -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel: those that are given, like `0.5:0.5`, or else of the training set.

        A channel of one value alone is shifted to 0 and not divided. Refused where inputs are no single tensor.
        """
        x = get_single_tensor(self.inputs, "normalise", "Normalise them before you give them.")
        if given:
            return fit_moments(given, x)
        dims = [0, *range(2, x.dim())]
        low, mean = x.amin(dims, keepdim=True), x.mean(dims, keepdim=True)
        std = x.std(dims, keepdim=True, correction=int(len(x) > 1))
        constant = low == x.amax(dims, keepdim=True)  # where mean and deviation differ from x and 0 by rounding alone
        return torch.where(constant, low, mean), torch.where(constant, 1.0, std.clamp(min=1e-8))

    def normalise(self, given: str = "") -> "Dataset":
        """The data set with each channel shifted by its mean and divided by its deviation; see `find_moments`."""
        if not has_moments(self.inputs):
            return self
        mean, std = self.find_moments(given)
        x, test_x = (get_single_tensor(own, "normalise") for own in (self.inputs, self.test_inputs))
        final = self.final_inputs
        return replace(
            self,
            inputs=(x - mean) / std,
            test_inputs=(test_x - mean) / std,
            final_inputs=None if final is None else (get_single_tensor(final, "normalise") - mean) / std,
        )

    def to(self, dtype: torch.dtype, device: torch.device) -> "Dataset":
        def move(t: Tensor) -> Tensor:
            if t.dtype == torch.uint8:
                return t.to(device=device).to(dtype) / 255
            return t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype)

        def move_targets(t: Tensor) -> Tensor:
            return t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype)

        return replace(
            self,
            inputs=tree.map_tensors(move, self.inputs),
            targets=move_targets(self.targets),
            test_inputs=tree.map_tensors(move, self.test_inputs),
            test_targets=move_targets(self.test_targets),
            final_inputs=None if self.final_inputs is None else tree.map_tensors(move, self.final_inputs),
            final_targets=None if self.final_targets is None else move_targets(self.final_targets),
        )

    def keep_test_half(self, whole: "Dataset") -> "Dataset":
        """The data set with the test half of the one that validation samples were taken from."""
        return replace(self, final_inputs=whole.test_inputs, final_targets=whole.test_targets)

    def take_test_half(self) -> "Dataset | None":
        """The data set to be judged on the test half again; None where that was not kept."""
        if self.final_inputs is None or self.final_targets is None:
            return None
        return replace(self, test_inputs=self.final_inputs, test_targets=self.final_targets)


def parse_moments(text: str) -> tuple[list[float], list[float]]:
    """Means and deviations from a text like `0.5:0.5`, or `0.49,0.48,0.45:0.25,0.24,0.26` for three channels."""
    try:
        means, deviations = ([float(number) for number in half.split(",")] for half in text.split(":"))
    except ValueError:
        means = deviations = []
    finite = all(map(isfinite, (*means, *deviations)))
    if not means or len(means) != len(deviations) or not finite or min(deviations) <= 0:
        advice = "Write a mean and a deviation above 0 like 0.5:0.5, or one of each for every channel."
        raise ShoalError("bad-value", f"normalise_by is {text[:80]!r}, which is no mean and deviation.", advice)
    return means, deviations


def fit_moments(text: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The given means and deviations in the form of the inputs' channels."""
    means, deviations = parse_moments(text)
    channels = inputs.shape[1] if inputs.dim() > 1 else 1
    if len(means) not in (1, channels):
        problem = f"normalise_by has {len(means)} means, and inputs have {channels} channels."
        raise ShoalError("bad-value", problem, f"Give 1 or {channels}.")
    shape = (1, channels, *[1] * (inputs.dim() - 2)) if inputs.dim() > 1 else (1,)
    mean, std = (inputs.new_tensor(own).expand(channels).reshape(shape).clone() for own in (means, deviations))
    return mean, std


def has_moments(inputs: Inputs) -> bool:
    """Whether inputs can be normalised, or are refused for it: all but whole numbers."""
    return not isinstance(inputs, Tensor) or inputs.is_floating_point()


def get_single_tensor(inputs: Inputs, key: str, advice: str = "") -> Tensor:
    """The inputs where they are one tensor; a dict or tuple is refused for the recipe's `key`."""
    if isinstance(inputs, Tensor):
        return inputs
    problem = f"{key} is for inputs of one tensor, and those of the data are {describe_inputs(inputs)}."
    raise ShoalError("bad-value", problem, advice or f"Leave {key} out, or give inputs as one tensor.")


def read_digits() -> Dataset:
    """1,797 scans of handwritten digits, 8 x 8 pixels: the first 1,437 to train on, the last 360 to test.

    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998),
    doi:10.24432/C50P49, licence CC BY 4.0; the copy that scikit-learn ships (its `load_digits`), pixels as integers
    from 0 to 16.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    x = torch.from_numpy(images).float().unsqueeze(1) / 16
    y = torch.from_numpy(labels).long()
    return Dataset("digits", x[:1437], y[:1437], x[1437:], y[1437:], 10)


DATASETS: dict[str, Callable[[], Dataset]] = {"digits": read_digits}
"""Data sets that need no files."""
HANDED_OVER: dict[str, Dataset] = {}
"""Data sets that a program gave as objects; they live as long as it does."""
