"""VGG11 without BatchNorm, with the small head of the CIFAR papers (9,750,922 parameters on 3x32x32)."""

from torch import nn

from shoal.core.model.net import Net
from shoal.models.chain import build_chain
from shoal.models.image_input import build_border, check_image_shape

VGG11_LAYERS = (1, "pool", 2, "pool", 4, 4, "pool", 8, 8, "pool", 8, 8, "pool")
"""Filters of the convolutions, as multiples of the first one's, and poolings."""


def vgg11(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """Eight conv3x3 from 64 to 512 filters with five poolings, fc512 fc512 classes; padded up to 32x32."""
    channels, tall, wide = check_image_shape(input_shape, "VGG11")
    border, tall, wide = build_border(tall, wide)
    layers: list[tuple[str, nn.Module]] = [("border", border)]
    convs = pools = 0
    for step in VGG11_LAYERS:
        if isinstance(step, int):
            convs += 1
            layers.append((f"conv{convs}", nn.Conv2d(channels, step * width, 3, padding=1)))
            layers.append((f"relu{convs}", nn.ReLU()))
            channels = step * width
        else:
            pools += 1
            layers.append((f"pool{pools}", nn.MaxPool2d(2)))
    layers += [
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(channels * (tall >> pools) * (wide >> pools), channels)),
        ("relu9", nn.ReLU()),
        ("fc2", nn.Linear(channels, channels)),
        ("relu10", nn.ReLU()),
        ("fc3", nn.Linear(channels, classes)),
    ]
    return build_chain(layers, input_shape, classes)
