"""The targets of a learning task: which task they are for, in which type it computes, and labels for splits."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shoal.core.builtin_tasks import TASKS
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.model.inputs import Inputs
from shoal.data.dataset import Dataset
from shoal.data.user_split import list_sequences

QUANTILE_BINS = 10
"""Ranges of equally many samples that stand for labels where targets are numbers."""


def is_yes_or_no(targets: Tensor) -> bool:
    """Whether all targets are 0 or 1."""
    return targets.dtype == torch.bool or bool(((targets == 0) | (targets == 1)).all())


def find_task_name(inputs: Inputs, targets: Tensor) -> str:
    """The name of the task that targets are clearly for: by their type, their shape, and whether all are 0 or 1."""
    all_yes_or_no = is_yes_or_no(targets)
    if targets.dim() == 1:
        if targets.is_floating_point():
            return "binary" if all_yes_or_no else "regress"
        return "classify"
    if targets.is_floating_point() or targets.dtype == torch.bool:
        return "multilabel" if all_yes_or_no and targets.shape[1] > 1 else "regress"
    return "multilabel" if all_yes_or_no and not list_sequences(inputs, targets) else "tokens"


def fit_targets(dataset: Dataset, task: LearningTask) -> Dataset:
    """The data set with targets of the type that the task computes with; targets that it cannot learn are refused."""
    final = dataset.final_targets
    for targets in (dataset.targets, dataset.test_targets, *([] if final is None else [final])):
        problem = find_target_problem(targets, task)
        if problem:
            form = f"The targets are {tuple(targets.shape)} {str(targets.dtype).removeprefix('torch.')}"
            raise ShoalError("no-data", f"{form}, and the task {task.name} needs {problem}.", "Give another task.")
    if task.name not in TASKS:
        return dataset
    dtype = torch.int64 if task.has_class_logits else torch.float32
    if task.has_class_logits == (not dataset.targets.is_floating_point()) and dataset.targets.dtype != torch.bool:
        return dataset
    return replace(
        dataset,
        targets=dataset.targets.to(dtype),
        test_targets=dataset.test_targets.to(dtype),
        final_targets=None if final is None else final.to(dtype),
    )


def find_target_problem(targets: Tensor, task: LearningTask) -> str:
    """What targets would have to be for a built-in task; "" where they are it."""
    all_yes_or_no = is_yes_or_no(targets)
    match task.name:
        case "classify" | "tokens" if targets.is_floating_point():
            return "whole numbers from 0 up"
        case "tokens" if targets.dim() != 2:
            return "a whole number for each position of a sample"
        case "binary" if targets.dim() > 2 or targets[:1].numel() > 1 or not all_yes_or_no:
            return "0 or 1 for each sample"
        case "multilabel" if targets.dim() != 2 or not all_yes_or_no:
            return "a row of 0 and 1 for each sample"
        case "regress" if targets.dim() > 2 or not bool(torch.isfinite(targets).all()):
            return "a finite number, or a row of them, for each sample"
    return ""


def count_outputs(task: LearningTask, dataset: Dataset) -> int:
    """How many numbers a model puts out for a sample, or for a position of it."""
    if task.outputs:
        return task.outputs
    columns = dataset.targets.shape[1] if dataset.targets.dim() > 1 else 1
    return dataset.classes if task.has_class_logits else columns


def count_target_classes(task: LearningTask, dataset: Dataset) -> int:
    """How many classes targets are told apart by; 0 where they are no classes."""
    if not task.predict_classes:
        return 0
    return dataset.classes if task.has_class_logits else max(dataset.classes, 2)


def derive_labels(task: LearningTask, targets: Tensor) -> tuple[np.ndarray, int]:
    """What splits and pictures go by in place of classes, and how many there are.

    Classes stand for themselves; a sample with several labels has each of them; a number stands for which of ten
    ranges of equally many samples it lies in. Where nothing of this fits, no sample has a label, which is -1.
    """
    values = targets.numpy()
    if task.predict_classes or (task.name not in TASKS and not targets.is_floating_point()):
        labels = values.reshape(len(values)) if values.ndim == 2 and values.shape[1] == 1 else values
        return labels.astype(np.int64, copy=False), int(labels.max(initial=0)) + 1
    if task.name == "multilabel":
        return np.where(values > 0.5, np.arange(values.shape[1]), -1), values.shape[1]
    if values[:1].size == 1:
        numbers = values.reshape(len(values)).astype(float)
        inner = np.quantile(numbers, np.linspace(0, 1, QUANTILE_BINS + 1)[1:-1])
        return np.searchsorted(inner, numbers, side="right"), QUANTILE_BINS
    return np.full((len(values), 1), -1), 1
