"""A perceptron with one hidden layer."""

from math import prod

from torch import nn

from shoal.core.net import Net
from shoal.core.plan import Axis, Block, Cut


def mlp(input_shape: tuple[int, ...], classes: int, hidden: int = 128) -> Net:
    """inputs - hidden - classes with ReLU between."""
    module = nn.Sequential()
    module.add_module("flatten", nn.Flatten())
    module.add_module("fc1", nn.Linear(prod(input_shape), hidden))
    module.add_module("relu", nn.ReLU())
    module.add_module("fc2", nn.Linear(hidden, classes))
    axes = (Axis("fc1", hidden, (Cut("fc1.weight", 0), Cut("fc1.bias", 0), Cut("fc2.weight", 1))),)
    blocks = (Block("hidden", ("flatten", "fc1", "relu")), Block("head", ("fc2",)))
    return Net(module, input_shape, classes, axes, blocks)
