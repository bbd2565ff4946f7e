"""Models that take the shape of their inputs and the number of classes, and state their axes and blocks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from os.path import isdir

import torch

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.model.inputs import Inputs, InputShape, describe_inputs
from shoal.core.model.net import Net
from shoal.models import user_model
from shoal.models.cnn import cnn
from shoal.models.cnn_pfllib import cnn_pfllib
from shoal.models.conv2cifar import conv2cifar
from shoal.models.hf_folder import is_hf_model
from shoal.models.hf_model import build_hf_net
from shoal.models.lenet import lenet, lenet_relu_logits
from shoal.models.lstm import lstm
from shoal.models.mlp import mlp, mlp_256, mlp_1024, mlp_1024_256
from shoal.models.resnet import (
    resnet18,
    resnet18_gn,
    resnet18_imagenet,
    resnet18_imagenet_gn,
    resnet18_nobias,
    resnet18_nobias_gn,
)
from shoal.models.vgg import vgg11
from shoal.models.vit import vit

MODELS: dict[str, Callable[..., Net]] = {
    "mlp": mlp,
    "mlp-256": mlp_256,
    "mlp-1024": mlp_1024,
    "mlp-1024-256": mlp_1024_256,
    "lenet": lenet,
    "lenet-relu-logits": lenet_relu_logits,
    "cnn": cnn,
    "cnn-pfllib": cnn_pfllib,
    "conv2cifar": conv2cifar,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
    "resnet18-nobias": resnet18_nobias,
    "resnet18-nobias-gn": resnet18_nobias_gn,
    "resnet18-imagenet": resnet18_imagenet,
    "resnet18-imagenet-gn": resnet18_imagenet_gn,
    "vit": vit,
    "lstm": lstm,
}
HANDED_OVER: dict[str, Callable[..., Net]] = {}
"""Models that a program gave as objects; they live as long as it does."""
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "mlp-1024": ((1, 28, 28), 10),
    "mlp-1024-256": ((1, 28, 28), 10),
    "lstm": ((35,), 10_000),
}
"""What models are described on when it is not 3x32x32 and 10 classes."""


def build_model(
    name: str,
    input_shape: InputShape,
    classes: int,
    seed: int,
    example: Inputs | None = None,
    task: str = "classify",
    words: int = 0,
) -> Net:
    """The model with first weights drawn from a seed of its own; `file.py:Name` is a model of the user's.

    Where inputs are a dict or tuple of tensors, `example` is one sample of them. The name of the learning task decides
    about the head of `hf:FOLDER`, a model of Hugging Face. Models that read `words` are told how many there are.
    """
    if example is not None and name in MODELS and "example" not in signature(MODELS[name]).parameters:
        problem = f"The model {name} takes one tensor, and the inputs are {describe_inputs(example)}."
        raise ShoalError("no-data", problem, "Use mlp, or a module of your own that takes them.")
    with torch.random.fork_rng(devices=[]):
        make = partial(find_model_maker(name), task=task) if is_hf_model(name) else find_model_maker(name)
        if name in MODELS and "words" in signature(MODELS[name]).parameters:
            make = partial(make, words=words)
        torch.manual_seed(seed)
        net = make(input_shape, classes) if example is None else make(input_shape, classes, example)
        return replace(net, seed=seed)


def find_model_maker(name: str) -> Callable[..., Net]:
    """The function that builds a model, by the model's name, a `file.py:Name` or an `hf:FOLDER`."""
    if is_hf_model(name):
        return partial(build_hf_net, name)
    if ".py:" in name:
        return user_model.load_model_maker(name)
    known = MODELS | HANDED_OVER
    if name.endswith(".py"):
        problem = f"The model {name} is a file, and says not which class or function of it."
        raise ShoalError("unknown-name", problem, f"Write {name}:NAME.")
    if name not in known and isdir(name):
        raise ShoalError(
            "unknown-name", f"The model {name} is a folder.", f"Write hf:{name} for a model of transformers."
        )
    if name not in known:
        raise unknown_name_error("model", name, MODELS)
    return known[name]


def describe_model(name: str) -> tuple[int, int]:
    """The number of parameters of a model, and the multiply-accumulates of one sample; no weights are made for it."""
    make = find_model_maker(name)
    with torch.device("meta"):
        net = make(*SHAPES.get(name, ((3, 32, 32), 10)))
        return sum(net.initial[k].numel() for k in net.trainable), net.macs_forward
