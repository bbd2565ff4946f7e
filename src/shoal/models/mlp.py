"""Perceptrons with one hidden layer."""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, InputShape, list_shapes
from shoal.core.model.net import Net
from shoal.models.chain import build_chain
from shoal.models.image_input import build_border, check_image_shape


class JoinInputs(nn.Module):
    """All tensors of a dict or tuple side by side, each flattened; whole numbers as they are, as real ones."""

    zero: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(()), persistent=False)  # of the type of the model

    def forward(self, inputs: Inputs) -> Tensor:
        return torch.cat([t.flatten(1).to(self.zero.dtype) for t in tree.collect_tensors(inputs)], 1)


def mlp(input_shape: InputShape, classes: int, example: Inputs | None = None, hidden: int = 128) -> Net:
    """inputs - 128 hidden units - classes with ReLU between; a dict or tuple of inputs is laid side by side."""
    size = sum(map(prod, list_shapes(input_shape)))
    join = nn.Flatten() if example is None else JoinInputs()
    net = build_chain((("flatten", join), *build_mlp_layers(size, hidden, classes)), input_shape, classes)
    return net if example is None else replace(net, example=example)


def mlp_256(input_shape: InputShape, classes: int, example: Inputs | None = None) -> Net:
    """inputs - 256 hidden units - classes with ReLU between; a dict or tuple of inputs is laid side by side."""
    return mlp(input_shape, classes, example, hidden=256)


def mlp_1024(input_shape: tuple[int, ...], classes: int, hidden: int = 128) -> Net:
    """FedBIAD's 1024 - 128 - 10: images smaller than 32x32 get a border of zeros first."""
    channels, height, width = check_image_shape(input_shape, "This perceptron")
    border, height, width = build_border(height, width)
    before = ("border", border), ("flatten", nn.Flatten())
    return build_chain((*before, *build_mlp_layers(channels * height * width, hidden, classes)), input_shape, classes)


def mlp_1024_256(input_shape: tuple[int, ...], classes: int) -> Net:
    """FedBIAD's 1024 - 256 - 10: images smaller than 32x32 get a border of zeros first."""
    return mlp_1024(input_shape, classes, hidden=256)


def build_mlp_layers(inputs: int, hidden: int, classes: int) -> tuple[tuple[str, nn.Module], ...]:
    """The layers of a perceptron with one hidden layer and ReLU."""
    return ("fc1", nn.Linear(inputs, hidden)), ("relu", nn.ReLU()), ("fc2", nn.Linear(hidden, classes))
