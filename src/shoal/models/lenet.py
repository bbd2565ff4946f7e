"""LeNet-5 as the federated papers use it: ReLU, max-pooling, no padding inside (62,006 parameters on 3x32x32)."""

from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.net import Net
from shoal.core.plan import Axis, Block, Cut


def lenet(input_shape: tuple[int, ...], classes: int) -> Net:
    """conv5x5(6) pool conv5x5(16) pool fc120 fc84 classes; images smaller than 32x32 get a border of zeros."""
    if len(input_shape) != 3:
        raise ShoalError("no-data", f"LeNet needs images, got inputs of shape {input_shape}.", "Use --model mlp.")
    channels, height, width = input_shape
    border = [max(0, 32 - height), max(0, 32 - width)]
    side = [((size + extra - 4) // 2 - 4) // 2 for size, extra in zip((height, width), border)]
    area = side[0] * side[1]
    module = nn.Sequential()
    if any(border):
        tall, wide = border
        module.add_module("border", nn.ZeroPad2d((wide // 2, wide - wide // 2, tall // 2, tall - tall // 2)))
    for name, layer in (
        ("conv1", nn.Conv2d(channels, 6, 5)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(6, 16, 5)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(16 * area, 120)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(120, 84)),
        ("relu4", nn.ReLU()),
        ("fc3", nn.Linear(84, classes)),
    ):
        module.add_module(name, layer)
    axes = (
        Axis("conv1", 6, (Cut("conv1.weight", 0), Cut("conv1.bias", 0), Cut("conv2.weight", 1))),
        Axis("conv2", 16, (Cut("conv2.weight", 0), Cut("conv2.bias", 0), Cut("fc1.weight", 1, span=area))),
        Axis("fc1", 120, (Cut("fc1.weight", 0), Cut("fc1.bias", 0), Cut("fc2.weight", 1))),
        Axis("fc2", 84, (Cut("fc2.weight", 0), Cut("fc2.bias", 0), Cut("fc3.weight", 1))),
    )
    blocks = (
        Block("conv1", ("border", "conv1", "relu1", "pool1")),
        Block("conv2", ("conv2", "relu2", "pool2", "flatten")),
        Block("fc1", ("fc1", "relu3")),
        Block("fc2", ("fc2", "relu4")),
        Block("head", ("fc3",)),
    )
    return Net(module, input_shape, classes, axes, blocks)
