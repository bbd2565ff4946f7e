"""Augmentation of images: flips and crops, drawn outside the training step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.types import Batch

Augment = Callable[[Batch, torch.Generator], Batch]


def parse_augment(text: str) -> Augment | None:
    """`flip`, `crop:4` (shift by up to 4 pixels, the border filled with 0), or both with a comma between."""
    steps = []
    for word in filter(None, text.split(",")):
        name, _, given = word.strip().partition(":")
        if name == "flip" and not given:
            steps.append(flip)
        elif name == "crop" and given.isdecimal() and 0 < int(given) < 1000:
            steps.append(lambda x, generator, pad=int(given): crop(x, generator, pad))
        else:
            raise ShoalError(
                "bad-value", f"The augmentation {word[:40]!r} cannot be read.", "Write flip, crop:4 or flip,crop:4."
            )
    if not steps:
        return None

    def augment(batch: Batch, generator: torch.Generator) -> Batch:
        x = batch.inputs
        for step in steps:
            x = step(x, generator)
        return batch._replace(inputs=x)

    return augment


def flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Every other image, by chance, seen in a mirror."""
    turned = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(turned.view(-1, *[1] * (x.dim() - 1)).to(x.device), x.flip(-1), x)


def crop(x: Tensor, generator: torch.Generator, pad: int) -> Tensor:
    """Every image shifted by its own random number of pixels."""
    height, width = x.shape[-2:]
    wide = F.pad(x, (pad, pad, pad, pad))
    top, left = torch.randint(0, 2 * pad + 1, (2, len(x)), generator=generator).to(x.device)
    rows = top[:, None] + torch.arange(height, device=x.device)
    columns = left[:, None] + torch.arange(width, device=x.device)
    samples = torch.arange(len(x), device=x.device)[:, None, None]
    return wide[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
