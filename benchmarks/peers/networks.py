"""The models of the jobs in plain PyTorch."""

from jobs import CLASSES
from torch import Tensor, nn


def network(name: str) -> nn.Sequential:
    """The module of a job: `lenet` (62,006 parameters), `cnn` (122,570), `mlp` (101,770) or one of the larger ones."""
    made = {"lenet": lenet, "cnn": cnn, "mlp": mlp, "pfl": pfl, "vgg11": vgg11, "lstm": lstm, "depthwise": depthwise}
    return nn.Sequential(*made[name]())


def lenet() -> list[nn.Module]:
    return [
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    ]


def cnn() -> list[nn.Module]:
    return [
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    ]


def mlp() -> list[nn.Module]:
    return [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, CLASSES)]


def pfl() -> list[nn.Module]:
    """The network of pfl-research's CIFAR-10 benchmark (1,626,442 parameters)."""
    return [
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES)),
    ]


def vgg11() -> list[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for width, pooled in ((64, True), (128, True), (256, False), (256, True), (512, False), (512, True), (512, False)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if pooled else [])]
        channels = width
    return [
        *layers,
        *(nn.Conv2d(512, 512, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, CLASSES)),
    ]


class LastOutput(nn.Module):
    """A recurrent layer of which the last output counts."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.recurrent = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


def lstm() -> list[nn.Module]:
    return [LastOutput(40, 64), nn.Linear(64, CLASSES)]


def depthwise() -> list[nn.Module]:
    """As in MobileNet: each channel is filtered alone, then channels are mixed."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()]
    for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        layers += [nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs), nn.ReLU()]
        layers += [nn.Conv2d(inputs, outputs, 1), nn.ReLU()]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES)]
