"""The learning task of a recipe: named, found from the targets, or the user's own; its loss and their options."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.builtin_tasks import LOSSES, TASKS
from shoal.core.errors import ShoalError, describe_error, unknown_name_error
from shoal.core.learning_task import LearningTask
from shoal.core.losses import compute_binary_cross_entropy
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, concat_inputs, scale_pixels, take_rows
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
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
"""Recipe keys that change the cross-entropy."""


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
    options: dict[str, Any] = {key: getattr(recipe, key) for key in CLASS_OPTIONS if getattr(recipe, key)}
    if options and not (task.has_class_logits or task.loss is compute_binary_cross_entropy):
        problem = f"{next(iter(options))} is an option of the cross-entropy, and the task {task.name} has another loss."
        raise ShoalError("bad-value", problem, "Leave it out.")
    if recipe.loss and options:
        problem = f"{next(iter(options))} is an option of the cross-entropy, and loss is {recipe.loss}."
        raise ShoalError("bad-value", problem, "Leave one of them out.")
    if recipe.loss:
        return replace(task, loss=find_loss(recipe.loss, task))
    if "class_weights" in options:
        weights = parse_class_weights(recipe.class_weights, task, classes, targets)
        options["yes_weights" if task.name == "multilabel" else "class_weights"] = weights
        options = {key: value for key, value in options.items() if not isinstance(value, str)}
    if task.skips_padding and task.has_class_logits and (options or task.name in TASKS):
        options["skips_padding"] = True
    return replace(task, loss=partial(task.loss, **options)) if options else task


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


def parse_class_weights(text: str, task: LearningTask, classes: int, targets: Tensor) -> tuple[float, ...]:
    """A weight for each class, of `binary` for no and yes, of `multilabel` for the yes of each label.

    They are those listed, or for `balanced` n / (C n_c), n_c of the n targets being of class c; of a label, how many
    samples lack it for one that has it.
    """
    several = task.name == "multilabel"
    count = targets.shape[1] if several else classes if task.has_class_logits else 2
    if text == "balanced" and several:
        there = (targets > 0.5).double().sum(0)
        return tuple(((len(targets) - there) / there.clamp(min=1)).tolist())
    if text == "balanced":
        counts = torch.bincount(targets[targets >= 0].long(), minlength=count).double()
        return tuple((counts.sum() / (count * counts.clamp(min=1))).tolist())
    try:
        weights = tuple(float(number) for number in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != count or not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise bad_value_error("class_weights", text, f"balanced, or {count} numbers from 0 up, like 1,2,0.5")
    return weights


def describe_loss(recipe: Recipe, task: LearningTask) -> str:
    """What makes the loss another one than that of the task classify, for keys of programs; "" where nothing does."""
    values = {key: getattr(recipe, key) for key in ("loss", *CLASS_OPTIONS) if getattr(recipe, key)}
    if values.get("class_weights") == "balanced":
        values["class_weights"] = task.loss
    name = "" if task.name in ("classify", "tokens") and not task.skips_padding else f", {recipe.task} {task.name}"
    return name + (f", {values}" if values else "")


STEP_ADVICE = "Correct its forward: look at operations in place (x += y, relu_), and at the types of numbers."


def check_task_on_model(net: Net, dataset: Dataset, loss_name: str, model_name: str) -> None:
    """Refuse a model whose outputs, or a loss whose values, do not fit: tried on two samples."""
    rows = torch.arange(2, device=dataset.targets.device) % len(dataset.targets)
    task, targets = net.task, dataset.targets.index_select(0, rows)
    samples = take_rows(dataset.inputs, rows)
    try:
        outputs = net.forward(net.initial, scale_pixels(samples))[0]
    except Exception as error:
        if isinstance(error, IndexError) and (fault := find_token_fault(net, samples, dataset)):
            raise make_model_error(model_name, *fault) from error
        why = f"it raises {describe_error(error)} on {net.dtype} samples of {dataset.name}"
        raise make_model_error(model_name, why, STEP_ADVICE) from error
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


def check_step_on_model(net: Net, dataset: Dataset, name: str) -> None:
    """Refuse a model whose loss in training, or the gradient of it, cannot be computed.

    It is tried on the samples with the largest word numbers, for which an embedding may be too small.
    """
    halves = [(dataset.inputs, dataset.targets), (dataset.test_inputs, dataset.test_targets)]
    chosen = [(own, targets, find_largest_words(own)) for own, targets in halves if len(targets) and not dataset.mapped]
    chosen = chosen or [(dataset.inputs, dataset.targets, [0, -1])]
    indices = [torch.tensor(rows, device=targets.device) % len(targets) for _, targets, rows in chosen]
    samples = concat_inputs([take_rows(own, index) for (own, *_), index in zip(chosen, indices)])
    targets = torch.cat([own.index_select(0, index) for (_, own, _), index in zip(chosen, indices)])
    leaves = {k: net.initial[k].detach().requires_grad_() for k in net.trainable}
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            outputs = run_and_watch_constants(net, net.initial | leaves, scale_pixels(samples), name)
            loss = net.task.compute_sample_losses(outputs, targets).sum()
            torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    except ShoalError:
        raise
    except Exception as error:
        if isinstance(error, IndexError) and (fault := find_token_fault(net, samples, dataset)):
            raise make_model_error(name, *fault) from error
        raise make_model_error(name, f"a step with it raises {describe_error(error)}", STEP_ADVICE) from error
    finally:
        net.reset_slots()


def run_and_watch_constants(net: Net, params: Params, samples: Inputs, name: str) -> Tensor:
    """The outputs in training; a model that writes to a buffer which is in no state dict is refused.

    Every device would go on with what the one before it left there. One that puts another tensor there may: what it
    keeps so, as for longer texts, follows from its settings.
    """
    holders = {id(layer._buffers): layer for layer in net.module.modules()}.values()
    names = [(layer, key) for layer in holders for key in sorted(layer._non_persistent_buffers_set)]
    kept = [(layer, key, layer._buffers.get(key)) for layer, key in names]
    before = [None if tensor is None else tensor.clone() for _, _, tensor in kept]
    outputs = net.forward(params, samples, training=True)[0]
    for (_, key, tensor), copy in zip(kept, before):
        if tensor is not None and copy is not None and not torch.equal(tensor.nan_to_num(), copy.nan_to_num()):
            why = f"its forward writes to the buffer {key}, which is in no state_dict, and devices would share it"
            raise make_model_error(name, why, "Register it with persistent=True: then each device has its own.")
    return outputs


def find_token_fault(net: Net, samples: Inputs, dataset: Dataset) -> tuple[str, str] | None:
    """Why a model cannot look samples up in its embeddings, and what to do; None where it can.

    The largest number of all samples is told unless they are mapped from the disk.
    """
    asked: list[tuple[int, Tensor]] = []

    def note_rows(module: nn.Module, given: tuple) -> None:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            asked.append((module.num_embeddings, given[0]))

    hooks = [module.register_forward_pre_hook(note_rows) for module in net.module.modules()]
    try:
        net.forward(net.initial, scale_pixels(samples))
    except Exception:
        pass  # it is known to fail
    finally:
        for hook in hooks:
            hook.remove()
    rows, numbers = asked[-1] if asked else (0, torch.zeros(0))
    if not numbers.numel():
        return None
    low, high = int(numbers.min()), int(numbers.max())
    if 0 <= low and high < rows:
        return None
    halves = [samples] if dataset.mapped else [dataset.inputs, dataset.test_inputs]
    if not any(x.shape == numbers.shape and torch.equal(x, numbers) for x in list_word_tensors(samples)):
        why = f"its embedding with {rows} rows is asked for the rows {low} to {high}"
        return why, f"Let it ask for rows from 0 up, and give the embedding {high + 1} rows or more."
    words = [x for own in halves for x in list_word_tensors(own)]
    low, high = min(int(x.min()) for x in words), max(int(x.max()) for x in words)
    if low < 0:
        why = f"it looks up tokens in its embedding, and the smallest token in the data is {low}"
        return why, "Number tokens from 0 up, and give padding a number of its own."
    why = f"its embedding with {rows} rows is too small for the tokens, of which the largest in the data is {high}"
    return why, f"Give its embedding {high + 1} rows or more, such as torch.nn.Embedding({high + 1}, ...)."


def list_word_tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors of whole numbers, which models look up in embeddings."""
    return [x for x in tree.collect_tensors(inputs) if x.dtype == torch.int64 and x.numel()]


def find_largest_words(inputs: Inputs) -> list[int]:
    """The numbers of two samples, or more: in each tensor of whole numbers one of them has the largest."""
    rows = [int(x.argmax()) // x[0].numel() for x in list_word_tensors(inputs)]
    return [*rows, *range(2 - len(rows))]
