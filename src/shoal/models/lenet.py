"""LeNet-5 as the federated papers use it: ReLU, max-pooling, no padding inside (62,006 parameters on 3x32x32)."""

from torch import nn

from shoal.core.model.net import Net
from shoal.models.chain import build_chain
from shoal.models.image_input import build_border, check_image_shape


def lenet(input_shape: tuple[int, ...], classes: int) -> Net:
    """conv5x5(6) pool conv5x5(16) pool fc120 fc84 classes; images smaller than 32x32 get a border of zeros."""
    return build_chain(list_lenet_layers(input_shape, classes), input_shape, classes)


def lenet_relu_logits(input_shape: tuple[int, ...], classes: int) -> Net:
    """The same with a ReLU on the logits, as in the released code of FedDHAD and FedDUAP; no logit is below 0."""
    layers = (*list_lenet_layers(input_shape, classes), ("relu5", nn.ReLU()))
    return build_chain(layers, input_shape, classes)


def list_lenet_layers(input_shape: tuple[int, ...], classes: int) -> tuple[tuple[str, nn.Module], ...]:
    """The layers by name, in their order."""
    channels, height, width = check_image_shape(input_shape, "LeNet")
    border, height, width = build_border(height, width)
    area = ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
    return (
        ("border", border),
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
    )
