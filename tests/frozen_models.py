"""Models with frozen and with tied tensors, as a stranger writes them: plain modules, nothing of the package."""

from typing import Any

import torch
from torch import Tensor, nn


class Backboned(nn.Module):
    """A frozen backbone of convolution, batch norm and a wide layer, and a small head that is trained."""

    def __init__(self, classes: int = 10, seed: int = 0, width: int = 64, frozen: bool = True):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            norm: Any = nn.BatchNorm2d(4)
            nn.init.uniform_(norm.running_mean)
            layers = (nn.Conv2d(1, 4, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(256, width), nn.Tanh())
            self.backbone = nn.Sequential(*layers)
        self.backbone.requires_grad_(not frozen)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class TiedWords(nn.Module):
    """The last layer has the embedding as its weight, as GPT-2 has; the layer between is called twice."""

    def __init__(self, classes: int = 11, width: int = 6, frozen: bool = False):
        super().__init__()
        self.words = nn.Embedding(classes, width)
        self.middle = nn.Linear(width, width)
        self.again = self.middle
        self.last = nn.Linear(width, classes, bias=False)
        self.last.weight = self.words.weight
        self.words.weight.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.middle(self.words(x)).tanh()))


def draw_words() -> tuple[Tensor, Tensor]:
    """Texts of five words, and the word after each."""
    text = torch.randint(0, 11, (90, 6), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
