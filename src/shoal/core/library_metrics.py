"""Metrics of torchmetrics for the built-in tasks, made when they are asked for; the package is imported no earlier."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ShoalError

MEANS_OVER_CLASSES = ("MulticlassAccuracy", "MulticlassAUROC", "MultilabelAUROC")
"""Metrics that torchmetrics takes for 0 of classes that no sample has."""


@dataclass(frozen=True)
class LibraryMetric:
    """What makes a metric of torchmetrics, given how many outputs a model has."""

    class_name: str
    """The class, in `torchmetrics.classification` or `torchmetrics.regression`."""
    size: str = ""
    """The argument that takes the number of outputs; "" where there is none."""
    settings: dict[str, Any] = field(default_factory=dict)
    room: str = "classification"
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """(predictions, targets) -> what the metric is given, where it wants them otherwise."""

    def __call__(self, outputs: int) -> "PreparedMetric":
        if find_spec("torchmetrics") is None:
            problem = f"{self.class_name} is a metric of torchmetrics, which is not installed."
            raise ShoalError("missing-extra", problem, "Run: pip install 'shoal[metrics]'.")
        make = getattr(import_module(f"torchmetrics.{self.room}"), self.class_name)
        sized = {self.size: outputs} if self.size else {}
        metric = make(**sized, **self.settings)
        if self.room == "regression":
            metric.set_dtype(torch.float64)  # sums of squares lose too many digits in 32 bits
        return PreparedMetric(metric, self.prepare, outputs if self.size else 2, self.class_name in MEANS_OVER_CLASSES)


class PreparedMetric:
    """A metric of torchmetrics in one evaluation, given predictions and targets in the form that it takes."""

    def __init__(
        self,
        metric: Any,
        prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
        classes: int = 0,
        is_mean_over_classes: bool = False,
    ):
        self.metric, self.prepare, self.is_mean_over_classes = metric, prepare, is_mean_over_classes
        self.samples, self.counts = 0, torch.zeros(classes, dtype=torch.int64)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        predictions, targets = self.prepare(predictions, targets) if self.prepare else (predictions, targets)
        self.metric.update(predictions, targets)
        if self.is_mean_over_classes:
            by_class = targets.sum(0) if targets.dim() == 2 else targets.bincount(minlength=len(self.counts))
            self.counts, self.samples = self.counts + by_class, self.samples + len(targets)

    def compute(self) -> float:
        """The value; a mean over classes is over those that can be judged, of which torchmetrics counts others as 0."""
        needs_others = "AUROC" in type(self.metric).__name__  # a curve needs samples of the class, and others
        judged = (self.counts > 0) & (self.counts < self.samples) if needs_others else self.counts > 0
        if not self.is_mean_over_classes or judged.all() or not judged.any():
            return float(self.metric.compute())
        self.metric.average = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the classes that are left out
            return float(self.metric.compute()[judged].mean())


def flatten_positions(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """One row of predictions for each target that counts, also where a sample has several positions."""
    rows, labels = predictions.reshape(-1, predictions.shape[-1]), targets.reshape(-1)
    return rows[labels >= 0], labels[labels >= 0]


def read_yes_or_no(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities as two classes, 0 and 1; one half is no, as accuracy and predictions have it."""
    return (predictions.reshape(targets.shape) > 0.5).long(), targets.long()


def read_probability(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in the shape of their targets, which are 0 and 1."""
    return predictions.reshape(targets.shape), targets.long()


def read_numbers(predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in the shape of their targets, in double precision."""
    return predictions.reshape(targets.shape).double(), targets.double()
