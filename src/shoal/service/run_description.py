"""What a server tells devices about a run, and what a device makes of it: the form of its samples, model and method.

Descriptions are untrusted: they hold names and numbers, and nothing that could be run.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.builtin_tasks import TASKS
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.local.device import TrainingSetup
from shoal.core.losses import IGNORED_TARGET
from shoal.core.model.inputs import Inputs, get_input_shape, make_example, outline_sample
from shoal.core.model.net import Net
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER
from shoal.data.augment import parse_augment, refuse_augmenting
from shoal.data.dataset import Dataset
from shoal.data.sequences import MASK, pad_to_length
from shoal.models import build_model
from shoal.models.hf_folder import (
    HF_MODEL,
    PUBLIC_NAME,
    fingerprint_hf_config,
    get_public_name,
    is_hf_model,
    read_hf_config,
)
from shoal.models.hf_model import refuse_unknown_tokens
from shoal.plugins.load import load_method
from shoal.runs.recipe import Recipe, is_unset
from shoal.runs.recipe_optimiser import OPTIMISER_KEYS, make_optimiser
from shoal.runs.recipe_task import CLASS_OPTIONS, apply_loss, build_task, parse_class_weights
from shoal.runs.task_targets import count_outputs, find_target_problem
from shoal.service.run_compatibility import describe_device_parts, refuse_other_parts

SETUP_KEYS = ("method", "model", "seed", "momentum", "weight_decay", "clip", "augment", "precision")
"""The recipe's values that devices are sent: names and numbers, nothing that could be run."""
LATER_SETUP_KEYS = (
    *(key for key in OPTIMISER_KEYS if key not in SETUP_KEYS),
    *("task", "loss", *CLASS_OPTIONS, "gradient_checkpointing"),
    "local_test",
)
"""Those that servers of the first version do not send; they trained with their defaults.

A value that means the same as a key that is not there is not sent, so that a device that does not know the key yet can
take part in a run that does not use it.
"""
KNOWN_KEYS = frozenset(SETUP_KEYS + LATER_SETUP_KEYS) | set(
    "threads model_digest model_config skips_padding outputs device_parts shape example classes words mean std".split()
)
"""All that a description may have; a device refuses what it does not know."""


class ModelAbsent(Exception):
    """The device has no folder with the model of the run, or one with another config."""


def get_run_length(run_description: dict[str, Any]) -> int:
    """How many positions the padded sequences of a run have; 0 where samples are no such sequences."""
    example = run_description.get("example")
    mask = example.get(MASK) if isinstance(example, dict) else None
    return mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0


def pad_to_run_length(x: Inputs, y: Tensor, run_description: dict[str, Any]) -> tuple[Inputs, Tensor]:
    """A device's padded sequences, and targets of their positions, as long as those of the run."""
    length = get_run_length(run_description)
    if y.dim() == 2 and isinstance(x, dict) and MASK in x and y.shape == x[MASK].shape:
        y = torch.nn.functional.pad(y, (0, max(0, length - y.shape[1])), value=IGNORED_TARGET)
    return pad_to_length(x, length), y


def is_described_form(inputs: Inputs, run_description: dict[str, Any]) -> bool:
    """Whether a device's inputs are of the form that the run is about; a dict may have another order of its keys."""
    example = run_description.get("example")
    if isinstance(inputs, Tensor):
        return example is None and list(inputs.shape[1:]) == run_description["shape"]
    if isinstance(inputs, dict) and isinstance(example, dict):
        same_keys = inputs.keys() == example.keys()
        return same_keys and outline_sample({key: inputs[key] for key in example}) == outline_sample(example)
    return (
        isinstance(inputs, tuple) and isinstance(example, tuple) and outline_sample(inputs) == outline_sample(example)
    )


def read_device_task(run_description: dict[str, Any]) -> LearningTask:
    """The task of a run, one of the built-in ones; servers of the first version name none, and classify."""
    task = TASKS.get(run_description.get("task") or "classify")
    if task is None:
        raise ShoalError("damaged", "The server names no known task.", "Devices run nothing that they are sent.")
    return replace(task, skips_padding=bool(run_description.get("skips_padding")))


def are_described_targets(targets: Tensor, run_description: dict[str, Any]) -> bool:
    """Whether a device's targets are of the kind that the run's task is about."""
    task = read_device_task(run_description)
    if find_target_problem(targets, task):
        return False
    if task.has_class_logits:
        lowest = IGNORED_TARGET if task.skips_padding else 0
        return int(targets.max()) < run_description["classes"] and int(targets.min()) >= lowest
    columns = targets.shape[1] if targets.dim() > 1 else 1
    return bool(task.outputs) or columns == run_description["outputs"]


def build_device_setup(run_description: dict[str, Any], samples: Samples, models: str = "") -> TrainingSetup:
    """The training setup of a run on a device; names that stand for Python files are refused.

    A model of Hugging Face is one of the folder `models` of the device's own disk.
    """
    settings = {key: run_description[key] for key in SETUP_KEYS}
    settings |= {key: run_description[key] for key in LATER_SETUP_KEYS if key in run_description}
    if is_hf_model(str(settings["model"])):
        settings["model"] = find_own_model(settings["model"], str(run_description.get("model_config")), models)
        refuse_unknown_tokens(read_hf_config(settings["model"]), samples.inputs, settings["model"])
    elif ".py" in str(settings["model"]):
        raise ShoalError("damaged", "The server names a Python file.", "Devices run nothing that they are sent.")
    if any(".py" in str(settings.get(key, "")) for key in ("method", "task", "loss")):
        raise ShoalError("damaged", "The server names a Python file.", "Devices run nothing that they are sent.")
    recipe = Recipe().with_values(**settings)
    method: Method = load_method(recipe.method, recipe.parts)
    refuse_other_parts(run_description, method)
    streams = RandomStreams(recipe.seed)
    example = run_description.get("example")
    shape = tuple(run_description["shape"]) if example is None else get_input_shape(example)
    classes = run_description["classes"]
    task = apply_loss(recipe, read_device_task(run_description), classes, samples.targets)
    outputs = run_description.get("outputs", classes)
    seed, words = streams.derive_seed("init"), run_description.get("words", 0)
    net: Net = build_model(recipe.model, shape, outputs, seed, example, task.name, words)
    dtype = torch.float64 if recipe.precision == "float64" else torch.float32
    net = replace(net, module=net.module.to(dtype=dtype), half=recipe.precision == "bf16", task=task)
    net = replace(net, checkpointing=recipe.gradient_checkpointing)
    net = method.model(net)
    if net.digest != run_description.get("model_digest", ""):
        problem = "The model has other frozen tensors on this device than on the server."
        raise ShoalError("other-recipe", problem, "Install the same model on both.")
    no_samples = Samples(samples.inputs, samples.targets, torch.arange(0))
    get_samples: Callable[[int], Samples] = lambda device: no_samples if device == SERVER else samples  # noqa: E731
    augment = parse_augment(recipe.augment)
    if augment:
        refuse_augmenting(samples.inputs)
    return TrainingSetup(method, net, streams, make_optimiser(recipe), get_samples, augment)


def find_own_model(name: str, config: str, models: str) -> str:
    """The model of this name in the device's folder `models`, with the config that the run is about.

    The name is a word, or two with a slash between them, and never leads out of that folder.
    """
    word = name.removeprefix(HF_MODEL)
    if not PUBLIC_NAME.fullmatch(word):
        raise ShoalError("damaged", "The server names a path.", "Devices read nothing that a server names.")
    if not models:
        raise ModelAbsent(f"The run is about the model {word}: start `shoal join` with --models FOLDER.")
    folder = Path(models) / word
    try:
        own = fingerprint_hf_config(f"{HF_MODEL}{folder}") if folder.is_dir() else ""
    except (ShoalError, ValueError) as error:
        raise ModelAbsent(f"There is no config in {folder}.") from error
    if own != config:
        why = f"the config in {folder} is another one" if own else f"there is no folder {folder}"
        raise ModelAbsent(f"The run is about the model {word}, and {why}.")
    return f"{HF_MODEL}{folder}"


def read_thread_count(run_description: dict[str, Any]) -> int:
    """The run's number of threads, the same on every device: it changes the last digits of what is computed."""
    return Recipe().with_values(threads=run_description.get("threads", 0)).threads or 1


def build_run_description(
    recipe: Recipe, dataset: Dataset, moments: tuple[Tensor, Tensor] | None, digest: str = ""
) -> dict:
    """What the server sends every device of a run: values of the recipe, and form, classes and moments of the data.

    The form is the shape of one sample, or one sample of zeros where inputs are a dict or tuple of tensors. Of frozen
    tensors only the digest is sent: a device has its own, and refuses to train on others.
    """
    mean, std = moments or (None, None)
    keys = {key.name: key for key in fields(recipe)}
    settings = {key: getattr(recipe, key) for key in (*SETUP_KEYS, *LATER_SETUP_KEYS)}
    settings = {k: v for k, v in settings.items() if not (keys[k].metadata.get("later") and is_unset(keys[k], v))}
    settings |= {"threads": recipe.threads, "model_digest": digest}
    settings["device_parts"] = describe_device_parts(load_method(recipe.method, recipe.parts))
    if is_hf_model(recipe.model):
        settings |= {"model": get_public_name(recipe.model), "model_config": fingerprint_hf_config(recipe.model)}
    task = build_task(recipe, dataset)
    settings |= {"task": task.name, "skips_padding": task.skips_padding, "outputs": count_outputs(task, dataset)}
    if recipe.class_weights:
        weights = parse_class_weights(recipe.class_weights, task, dataset.classes, dataset.targets)
        settings["class_weights"] = ",".join(map(repr, weights))
    example = make_example(dataset.inputs)
    form = {"shape": list(dataset.input_shape)} if example is None else {"example": example}
    return settings | form | {"classes": dataset.classes, "words": dataset.words, "mean": mean, "std": std}
