"""The models of the jobs in plain PyTorch."""

from jobs import CLASSES
from torch import nn


def network(name: str) -> nn.Sequential:
    """`lenet` (62,006 parameters), `cnn` (122,570) or `mlp` (101,770)."""
    return nn.Sequential(*{"lenet": lenet, "cnn": cnn, "mlp": mlp}[name]())


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
