"""Augmentation of images by flips and crops; drawing and applying are separate, so that engines share the draws."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import ShoalError


@dataclass(frozen=True)
class Flip:
    """Mirrors each image with probability 1/2."""

    def draw(self, generator: torch.Generator, images: int) -> Tensor:
        return torch.rand(images, generator=generator) < 0.5

    def transform_images(self, x: Tensor, mirrored: Tensor) -> Tensor:
        return torch.where(mirrored.view(-1, *[1] * (x.dim() - 1)), x.flip(-1), x)


@dataclass(frozen=True)
class Crop:
    """Shifts each image by its own random number of pixels, and fills the border with 0."""

    pad: int

    def draw(self, generator: torch.Generator, images: int) -> Tensor:
        return torch.randint(0, 2 * self.pad + 1, (2, images), generator=generator).t()

    def transform_images(self, x: Tensor, corners: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        wide = F.pad(x, (self.pad, self.pad, self.pad, self.pad))
        rows = corners[:, 0, None] + torch.arange(height, device=x.device)
        columns = corners[:, 1, None] + torch.arange(width, device=x.device)
        samples = torch.arange(len(x), device=x.device)[:, None, None]
        return wide[samples, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ImageAugmentation:
    """A sequence of augmentations, applied one after the other."""

    steps: tuple[Flip | Crop, ...]

    @property
    def count(self) -> int:
        return len(self.steps)

    def draw(self, generator: torch.Generator, images: int) -> list[Tensor]:
        """The random numbers for a batch, one row per image."""
        return [step.draw(generator, images) for step in self.steps]

    def transform_images(self, x: Tensor, drawn: list[Tensor]) -> Tensor:
        for step, own in zip(self.steps, drawn, strict=True):
            x = step.transform_images(x, own.to(x.device))
        return x


def parse_augment(text: str) -> ImageAugmentation | None:
    """`flip`, `crop:4` (shift by up to 4 pixels), or both with a comma between."""
    steps: list[Flip | Crop] = []
    for word in filter(None, text.split(",")):
        name, _, given = word.strip().partition(":")
        if name == "flip" and not given:
            steps.append(Flip())
        elif name == "crop" and given.isdecimal() and 0 < int(given) < 1000:
            steps.append(Crop(int(given)))
        else:
            raise ShoalError(
                "bad-value", f"The augmentation {word[:40]!r} cannot be read.", "Write flip, crop:4 or flip,crop:4."
            )
    return ImageAugmentation(tuple(steps)) if steps else None
