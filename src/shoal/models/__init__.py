"""Models that take the shape of their inputs and the number of classes, and state their axes and blocks."""

from collections.abc import Callable

import torch

from shoal.core.errors import unknown
from shoal.core.net import Net
from shoal.models.lenet import lenet
from shoal.models.mlp import mlp

MODELS: dict[str, Callable[[tuple[int, ...], int], Net]] = {"mlp": mlp, "lenet": lenet}


def build(name: str, input_shape: tuple[int, ...], classes: int, seed: int) -> Net:
    """The model with first weights drawn from a seed of its own."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[name](input_shape, classes)
