"""The built-in learning tasks: classify, binary, multilabel, regress, tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core import losses
from shoal.core.learning_task import LearningTask
from shoal.core.library_metrics import (
    LibraryMetric,
    flatten_positions,
    read_numbers,
    read_probability,
    read_yes_or_no,
)
from shoal.core.metric import METRICS, Metric


def predict_probabilities(logits: Tensor) -> Tensor:
    """The probability of each class."""
    return logits.softmax(-1)


def predict_likeliest(logits: Tensor) -> Tensor:
    """The class with the largest logit."""
    return logits.argmax(-1)


def predict_yes(outputs: Tensor) -> Tensor:
    """1 where yes is likelier than no, else 0; one number per sample."""
    return (outputs.reshape(len(outputs), -1)[:, 0] > 0).long()


def is_label_right(outputs: Tensor, targets: Tensor) -> Tensor:
    """For each label whether it is given where it should be, and only there."""
    return (outputs.reshape(targets.shape) > 0) == (targets > 0.5)


def measure_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute error of each number."""
    return (outputs.reshape(targets.shape) - targets).abs()


def list_metrics(names: str, made: dict[str, Callable[..., Any]] | None = None) -> tuple[Metric, ...]:
    """The metrics with these names; what is `made` by something says so, and without a condition."""
    made = made or {}
    return tuple(replace(METRICS[name], make=made.get(name), when="") for name in names.split())


CLASS_METRICS = "accuracy loss top3 perplexity device_mean device_worst device_spread local_risk class_kl"
MULTICLASS = {
    name: LibraryMetric(kind, "num_classes", settings, prepare=flatten_positions, needs=needs)
    for name, kind, settings, needs in (
        ("balanced_accuracy", "MulticlassAccuracy", {"average": "macro"}, "yes"),
        ("f1_macro", "MulticlassF1Score", {"average": "macro"}, ""),
        ("f1_micro", "MulticlassF1Score", {"average": "micro"}, ""),
        ("auroc", "MulticlassAUROC", {}, "both"),
        ("average_precision", "MulticlassAveragePrecision", {}, "yes"),
        ("calibration_error", "MulticlassCalibrationError", {"n_bins": 15}, ""),
    )
}
CLASSIFIED = (
    *list_metrics(CLASS_METRICS),
    *list_metrics(" ".join(MULTICLASS), MULTICLASS),
    replace(METRICS["log_loss"], judge=losses.compute_log_loss),
)

CLASSIFY = LearningTask(
    "classify",
    losses.compute_cross_entropy,
    CLASSIFIED,
    "accuracy",
    predict=predict_probabilities,
    predict_classes=predict_likeliest,
    has_class_logits=True,
    about="one of several classes for each sample",
)
TOKENS = replace(CLASSIFY, name="tokens", about="one of several classes, such as a word, for each position of a sample")
TWO = {"num_classes": 2}
BINARY = LearningTask(
    "binary",
    losses.compute_binary_cross_entropy,
    (
        *list_metrics("accuracy loss device_mean device_worst device_spread local_risk"),
        *list_metrics(
            "balanced_accuracy f1_macro f1_micro auroc average_precision calibration_error",
            {
                "balanced_accuracy": LibraryMetric(
                    "MulticlassAccuracy", settings=TWO | {"average": "macro"}, prepare=read_yes_or_no, needs="yes"
                ),
                "f1_macro": LibraryMetric(
                    "MulticlassF1Score", settings=TWO | {"average": "macro"}, prepare=read_yes_or_no
                ),
                "f1_micro": LibraryMetric(
                    "MulticlassF1Score", settings=TWO | {"average": "micro"}, prepare=read_yes_or_no
                ),
                "auroc": LibraryMetric("BinaryAUROC", prepare=read_probability, needs="both"),
                "average_precision": LibraryMetric("BinaryAveragePrecision", prepare=read_probability, needs="yes"),
                "calibration_error": LibraryMetric(
                    "BinaryCalibrationError", settings={"n_bins": 15}, prepare=read_probability
                ),
            },
        ),
        replace(METRICS["log_loss"], judge=losses.compute_binary_log_loss),
    ),
    "accuracy",
    outputs=1,
    predict=torch.sigmoid,
    predict_classes=predict_yes,
    about="yes or no for each sample, by one output",
)
MULTILABEL = LearningTask(
    "multilabel",
    losses.compute_binary_cross_entropy,
    (
        replace(METRICS["accuracy"], judge=is_label_right, about="share of labels that the judged model gets right"),
        *list_metrics("loss"),
        *list_metrics(
            "f1_macro f1_micro auroc average_precision",
            {
                name: LibraryMetric(kind, "num_labels", settings, prepare=read_probability, needs=needs)
                for name, kind, settings, needs in (
                    ("f1_macro", "MultilabelF1Score", {"average": "macro"}, ""),
                    ("f1_micro", "MultilabelF1Score", {"average": "micro"}, ""),
                    ("auroc", "MultilabelAUROC", {}, "both"),
                    ("average_precision", "MultilabelAveragePrecision", {}, "yes"),
                )
            },
        ),
        replace(METRICS["log_loss"], judge=losses.compute_binary_log_loss),
    ),
    "accuracy",
    predict=torch.sigmoid,
    about="any number of labels for each sample",
)
REGRESS = LearningTask(
    "regress",
    losses.compute_squared_error,
    (
        replace(METRICS["mae"], judge=measure_absolute_error, when=""),
        *list_metrics("loss"),
        *list_metrics(
            "rmse r2",
            {
                "rmse": LibraryMetric(
                    "MeanSquaredError", settings={"squared": False}, room="regression", prepare=read_numbers
                ),
                "r2": LibraryMetric("R2Score", room="regression", prepare=read_numbers),
            },
        ),
    ),
    "mae",
    about="a number, or several, for each sample",
)
TASKS: dict[str, LearningTask] = {task.name: task for task in (CLASSIFY, BINARY, MULTILABEL, REGRESS, TOKENS)}
"""The built-in tasks by name."""
LOSSES: dict[str, dict[str, Callable[..., Tensor]]] = {
    "regress": {
        "squared": losses.compute_squared_error,
        "absolute": losses.compute_absolute_error,
        "huber": losses.compute_huber_loss,
    }
}
"""By task, the losses that a recipe can name beside the one that the task has."""
