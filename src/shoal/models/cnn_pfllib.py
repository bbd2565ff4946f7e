"""The network of two convolutions and one hidden layer that PFLlib calls FedAvgCNN (878,538 parameters on 3x32x32)."""

from torch import nn

from shoal.core.model.net import Net
from shoal.models.chain import build_chain
from shoal.models.image_input import build_border, check_image_shape

LEAST_SIDE = 16
"""Pixels of a side that leave something after two convolutions and poolings; smaller images get a border of zeros."""


def cnn_pfllib(input_shape: tuple[int, ...], classes: int) -> Net:
    """conv5x5(32) pool conv5x5(64) pool fc512 classes, no padding inside; padded up to 16x16."""
    channels, height, width = check_image_shape(input_shape, "The CNN of PFLlib")
    border, height, width = build_border(height, width, LEAST_SIDE)
    area = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    layers = (
        ("border", border),
        ("conv1", nn.Conv2d(channels, 32, 5)),
        ("relu1", nn.ReLU()),
        ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(32, 64, 5)),
        ("relu2", nn.ReLU()),
        ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(64 * area, 512)),
        ("relu3", nn.ReLU()),
        ("fc2", nn.Linear(512, classes)),
    )
    return build_chain(layers, input_shape, classes)
