"""Metrics of torchmetrics for the built-in tasks, made when they are asked for; the package is imported no earlier."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from math import nan
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from shoal.core.errors import ShoalError


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
    needs: str = ""
    """What a class, or a label, must have among the targets to be judged: "yes" those that are of it, "both" also
    those that are not; "" where a class without any is no trouble."""

    def __call__(self, outputs: int) -> "PreparedMetric":
        if find_spec("torchmetrics") is None:
            problem = f"{self.class_name} is a metric of torchmetrics, which is not installed."
            raise ShoalError("missing-extra", problem, "Run: pip install 'shoal[metrics]'.")
        make = getattr(import_module(f"torchmetrics.{self.room}"), self.class_name)
        sized = {self.size: outputs} if self.size else {}
        metric = make(**sized, **self.settings)
        if self.room == "regression":
            metric.set_dtype(torch.float64)  # sums of squares lose too many digits in 32 bits
        return PreparedMetric(metric, self.prepare, self.needs)


class PreparedMetric:
    """A metric of torchmetrics in one evaluation, given predictions and targets in the form that it takes.

    torchmetrics gives a class that no target has a score of 0 in some means; here such a class is left out of them.
    """

    def __init__(self, metric: Any, prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None, needs: str = ""):
        self.metric, self.prepare, self.needs = metric, prepare, needs
        self.yes: Tensor | None = None
        self.seen = 0

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        predictions, targets = self.prepare(predictions, targets) if self.prepare else (predictions, targets)
        self.metric.update(predictions, targets)
        if self.needs:
            counts, seen = self.count_targets(targets)
            self.yes, self.seen = counts if self.yes is None else self.yes + counts, self.seen + seen

    def count_targets(self, targets: Tensor) -> tuple[Tensor, int]:
        """By class or label how many targets are of it, and how many there are."""
        if classes := getattr(self.metric, "num_classes", None):
            return torch.bincount(targets.flatten(), minlength=classes), targets.numel()
        labels = targets.reshape(-1, getattr(self.metric, "num_labels", None) or 1)
        return labels.sum(0), len(labels)

    def compute(self) -> float:
        if self.yes is None:
            return float(self.metric.compute())
        judged = (self.yes > 0) & ((self.yes < self.seen) | (self.needs != "both"))
        if judged.all():
            return float(self.metric.compute())
        if not judged.any():
            return nan
        self.metric.average = "none"
        with catch_warnings():
            simplefilter("ignore")  # that there are classes without targets, whose scores are not looked at
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
