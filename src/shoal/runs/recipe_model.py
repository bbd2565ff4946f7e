"""The model that a recipe names: where and in which numbers it computes, its first weights, whether it can train."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from shoal.core.builtin_tasks import CLASSIFY, TASKS
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.model import tree
from shoal.core.model.checkpointing import require_repeated_layers
from shoal.core.model.inputs import make_example
from shoal.core.model.net import Net
from shoal.core.streams import RandomStreams
from shoal.data.dataset import Dataset
from shoal.models import MODELS, build_model
from shoal.models.hf_folder import fingerprint_hf_config, is_hf_model
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_task import check_step_on_model, check_task_on_model, describe_loss
from shoal.runs.task_targets import count_outputs
from shoal.storage.files import read_tensors

log = logging.getLogger("shoal")


def set_precision(precision: str, place: torch.device) -> tuple[torch.dtype, bool]:
    """The dtype of weights and inputs, and whether layers compute in bfloat16; sets whether a GPU uses TF32."""
    gpu = place.type == "cuda"
    if precision == "auto" and gpu:
        log.info("numbers: float32 with products in TF32; --precision float32 for exact ones")
    if precision == "tf32" and not gpu:
        raise ShoalError("bad-value", "precision is tf32, and only a GPU has it.", "Use float32, bf16 or float64.")
    if gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("auto", "tf32")
    return torch.float64 if precision == "float64" else torch.float32, precision == "bf16"


def parse_compute_device(name: str) -> torch.device:
    """The torch device of a recipe's `compute`; one that this machine lacks is refused."""
    try:
        place = torch.device(name)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise ShoalError("bad-value", f"compute is {name[:40]!r}.", "It must be cpu, cuda or cuda:N.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ShoalError(
            "no-device", f"There is no compute device {name}: {count} GPUs were found.", "Use --compute cpu."
        )
    return place


def build_recipe_net(
    recipe: Recipe,
    task: LearningTask,
    dataset: Dataset,
    streams: RandomStreams,
    dtype: torch.dtype,
    half: bool,
    place: torch.device,
) -> Net:
    """The net with first weights, drawn from the stream `init` or read from the recipe's file, tried on the data."""
    outputs, example = count_outputs(task, dataset), make_example(dataset.inputs)
    seed = streams.derive_seed("init")
    net = build_model(recipe.model, dataset.input_shape, outputs, seed, example, task.name, dataset.words)
    if recipe.init:
        load_first_weights(net, recipe.init)
    net = replace(net, module=net.module.to(device=place, dtype=dtype))
    refuse_infinite_weights(net, recipe)
    net = replace(net, half=half, task=task, checkpointing=recipe.gradient_checkpointing)
    check_model_on_data(recipe, net, dataset)
    return net


def load_first_weights(net: Net, file: str) -> None:
    """Read the weights of a net from a file, which must have all that are trained."""
    if not Path(file).is_file():
        raise ShoalError("no-data", f"There is no file {file}.", "Give a file with first weights.")
    weights = read_tensors(Path(file))
    for name, value in (net.initial | net.frozen).items():
        if name in net.frozen and name not in weights:
            continue  # the model has brought its own
        if name not in weights or weights[name].shape != value.shape:
            shape = f"shape {tuple(weights[name].shape)}" if name in weights else "nothing"
            raise ShoalError(
                "no-data",
                f"{file} has {shape} for {name}, the model needs {tuple(value.shape)}.",
                "Give weights of the same model.",
            )
    net.module.load_state_dict({k: weights[k] for k in (*net.initial, *net.frozen) if k in weights}, strict=False)


def refuse_infinite_weights(net: Net, recipe: Recipe) -> None:
    for name, value in net.initial.items():
        if not tree.is_tree_finite(value):
            source = recipe.init or f"The model {recipe.model}"
            raise ShoalError(
                "bad-value",
                f"{source} has first weights that are not finite ({name}), and nothing can be learnt from them.",
                "Give finite ones; a constant such as a mask belongs into a buffer with persistent=False.",
            )


def check_model_on_data(recipe: Recipe, net: Net, dataset: Dataset) -> None:
    """Refuse a model whose outputs do not fit the task, or whose training step fails on samples of the data."""
    if net.checkpointing:
        require_repeated_layers(net.module, recipe.model)
    if net.task.loss is not CLASSIFY.loss or recipe.model not in MODELS:
        loss_name = recipe.loss or (net.task.name if net.task.name not in TASKS else "")
        check_task_on_model(net, dataset, loss_name, recipe.model)
    if recipe.model not in MODELS or net.token_inputs:
        check_step_on_model(net, dataset, recipe.model)


def describe_local_step(recipe: Recipe, task: LearningTask, dataset: Dataset) -> str:
    """What a training step depends on besides the method: model, inputs, outputs, numbers and loss."""
    outputs = count_outputs(task, dataset)
    text = (
        f"{recipe.model} on {dataset.input_shape}, {outputs} classes, {recipe.precision}{describe_loss(recipe, task)}"
    )
    return f"{text}, {fingerprint_hf_config(recipe.model)}" if is_hf_model(recipe.model) else text
