"""The learning task of a recipe: named, found from the targets, or the user's own; its loss and their options."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.core.builtin_tasks import LOSSES, TASKS
from shoal.core.errors import ShoalError, describe_error, unknown_name_error
from shoal.core.learning_task import LearningTask
from shoal.core.model.inputs import take_rows
from shoal.core.model.net import Net
from shoal.data.dataset import Dataset
from shoal.models.user_call import make_model_error
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_values import bad_value_error
from shoal.runs.task_targets import find_task_name
from shoal.storage.python_file import load_named_object

log = logging.getLogger("shoal")
GIVEN_TASKS: dict[str, LearningTask] = {}
"""Tasks that a program gave as objects; they live as long as it does."""
GIVEN_LOSSES: dict[str, Callable[..., Tensor]] = {}
"""Losses that a program gave as functions."""
CLASS_OPTIONS = ("label_smoothing", "focal", "class_weights")
"""Recipe keys that change the loss of tasks with a logit for each class."""


def build_task(recipe: Recipe, dataset: Dataset) -> LearningTask:
    """The task that a recipe names, or else the one that its data say or their targets show; with its options."""
    name = recipe.task or dataset.task or find_task_name(dataset.inputs, dataset.targets)
    task = find_task(name)
    if not recipe.task and name not in ("classify", "tokens"):
        better = {"up": "more", "down": "less"}[next(m.better for m in task.metrics if m.name == task.headline)]
        log.info("task: %s, found from the targets; it is judged by %s, %s is better", name, task.headline, better)
    halves = (dataset.targets, dataset.test_targets, dataset.final_targets)
    if task.has_class_logits and any(bool((targets < 0).any()) for targets in halves if targets is not None):
        task = replace(task, skips_padding=True)
    return apply_loss(recipe, task, dataset.classes, dataset.targets)


def find_task(name: str) -> LearningTask:
    """The task of a name, of FILE.py:NAME, or of an object that the program gave."""
    if ".py:" in name:
        task = load_named_object(name)
        if not isinstance(task, LearningTask):
            raise make_model_error(name, f"it is a {type(task).__name__} and no LearningTask", "Make one of it.")
        return task
    known = TASKS | GIVEN_TASKS
    if name not in known:
        raise unknown_name_error("task", name, TASKS)
    return known[name]


def apply_loss(recipe: Recipe, task: LearningTask, classes: int, targets: Tensor) -> LearningTask:
    """The task with the recipe's own loss, or with the options of its cross-entropy.

    Balanced class weights are those of the `targets` to train on.
    """
    options = {key: getattr(recipe, key) for key in CLASS_OPTIONS if getattr(recipe, key)}
    if options and not task.has_class_logits:
        problem = f"{next(iter(options))} is an option of the tasks classify and tokens, and the task is {task.name}."
        raise ShoalError("bad-value", problem, "Leave it out.")
    if recipe.loss and options:
        problem = f"{next(iter(options))} is an option of the cross-entropy, and loss is {recipe.loss}."
        raise ShoalError("bad-value", problem, "Leave one of them out.")
    if recipe.loss:
        return replace(task, loss=find_loss(recipe.loss, task))
    if not options and not (task.skips_padding and task.has_class_logits and task.name in TASKS):
        return task
    if "class_weights" in options:
        options["class_weights"] = parse_class_weights(recipe.class_weights, classes, targets)
    return replace(task, loss=partial(task.loss, **options, skips_padding=task.skips_padding))


def find_loss(name: str, task: LearningTask) -> Callable[..., Tensor]:
    """The loss of FILE.py:NAME, of a function that the program gave, or of a name that the task knows."""
    if ".py:" in name:
        loss = load_named_object(name)
    else:
        known = LOSSES.get(task.name, {}) | GIVEN_LOSSES
        if name not in known:
            if not LOSSES.get(task.name):
                problem = f"loss is {name[:40]!r}, and the task {task.name} has one loss of its own."
                raise ShoalError("unknown-name", problem, "Leave it out, or give FILE.py:NAME.")
            raise unknown_name_error("loss", name, LOSSES[task.name])
        loss = known[name]
    arguments = (None, None, None) if task.mixes_batch else (None, None)
    try:
        inspect.signature(loss).bind(*arguments)
    except (TypeError, ValueError) as error:
        form = "(outputs, targets, weight)" if task.mixes_batch else "(outputs, targets)"
        raise make_model_error(name, f"it does not take {form}", f"Name a function of {form}.") from error
    return loss


def parse_class_weights(text: str, classes: int, targets: Tensor) -> tuple[float, ...]:
    """A weight for each class: those listed, or for `balanced` n / (C n_c), n_c of the n targets being of class c."""
    if text == "balanced":
        counts = torch.bincount(targets[targets >= 0].long(), minlength=classes).double()
        return tuple((counts.sum() / (classes * counts.clamp(min=1))).tolist())
    try:
        weights = tuple(float(number) for number in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != classes or not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise bad_value_error("class_weights", text, f"balanced, or {classes} numbers from 0 up, like 1,2,0.5")
    return weights


def describe_loss(recipe: Recipe, task: LearningTask) -> str:
    """What makes the loss another one than that of the task classify, for keys of programs; "" where nothing does."""
    values = {key: getattr(recipe, key) for key in ("loss", *CLASS_OPTIONS) if getattr(recipe, key)}
    if values.get("class_weights") == "balanced":
        values["class_weights"] = task.loss
    name = "" if task.name in ("classify", "tokens") and not task.skips_padding else f", {recipe.task} {task.name}"
    return name + (f", {values}" if values else "")


def check_task_on_model(net: Net, dataset: Dataset, loss_name: str) -> None:
    """Refuse a model whose outputs, or a loss whose values, do not fit: tried on two samples."""
    rows = torch.arange(2, device=dataset.targets.device) % len(dataset.targets)
    task, targets = net.task, dataset.targets.index_select(0, rows)
    outputs = net.forward(net.initial, take_rows(dataset.inputs, rows))[0]
    source = "The loss" if loss_name.startswith("own-") else loss_name or f"The loss of the task {task.name}"
    try:
        losses: Any = task.compute_sample_losses(outputs.detach().requires_grad_(), targets)
    except Exception as error:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        why = f"it raises {describe_error(error)} on {shapes}"
        advice = "Correct it there." if loss_name else "Give a model or a task that fits the targets."
        raise make_model_error(source, why, advice) from error
    if not isinstance(losses, Tensor) or losses.shape != (2,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        why = f"it gives {found} for 2 samples, and not one number for each"
        raise make_model_error(source, why, 'Give a loss per sample, as torch does with reduction="none".')
    if not losses.requires_grad:
        raise make_model_error(source, "it has no gradient", "Compute it from the outputs by torch operations.")
