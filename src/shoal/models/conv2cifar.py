"""The network of two wide convolutions that FedNH's code calls Conv2Cifar (797,952 parameters on 3x32x32)."""

from torch import nn

from shoal.core.model.net import Net
from shoal.models.chain import build_chain
from shoal.models.image_input import build_border, check_image_shape


def conv2cifar(input_shape: tuple[int, ...], classes: int) -> Net:
    """conv5x5(64) pool conv5x5(64) pool fc384 fc192 classes, the last without a bias; padded up to 32x32."""
    channels, height, width = check_image_shape(input_shape, "Conv2Cifar")
    border, height, width = build_border(height, width)
    area = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    layers = (
        ("border", border),
        ("conv1", nn.Conv2d(channels, 64, 5)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(64, 64, 5)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(64 * area, 384)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(384, 192)),
        ("relu4", nn.ReLU()),
        ("fc3", nn.Linear(192, classes, bias=False)),
    )
    return build_chain(layers, input_shape, classes)
