"""The three-layer CNN of FedDHAD and FedDUMAP (122,570 parameters on 3x32x32)."""

from torch import nn

from shoal.core.model.net import Net
from shoal.models.chain import build_chain
from shoal.models.image_input import build_border, check_image_shape


def cnn(input_shape: tuple[int, ...], classes: int) -> Net:
    """conv3x3(32) pool conv3x3(64) pool conv3x3(64) fc64 classes, no padding; padded up to 32x32."""
    channels, height, width = check_image_shape(input_shape, "The CNN")
    border, height, width = build_border(height, width)
    area = (((height - 2) // 2 - 2) // 2 - 2) * (((width - 2) // 2 - 2) // 2 - 2)
    layers = (
        ("border", border),
        ("conv1", nn.Conv2d(channels, 32, 3)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(32, 64, 3)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("conv3", nn.Conv2d(64, 64, 3)),
        ("relu3", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(64 * area, 64)),
        ("relu4", nn.ReLU()),
        ("fc2", nn.Linear(64, classes)),
    )
    return build_chain(layers, input_shape, classes)
