"""Augmentation of images by their values: brightness, contrast, and rectangles that are set to 0."""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from shoal.core.words import read_symmetric, read_uniform


@dataclass(frozen=True)
class Brightness:
    """Multiplies each image by a random factor from 1 - SHARE to 1 + SHARE."""

    share: float

    @property
    def words(self) -> int:
        return 1

    def read_draws(self, words: Tensor) -> Tensor:
        return read_symmetric(words)

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        return x * spread_over_image(1 + self.share * drawn.to(x.dtype), x)


@dataclass(frozen=True)
class Contrast:
    """Multiplies what each image differs from its mean by a random factor from 1 - SHARE to 1 + SHARE."""

    share: float

    @property
    def words(self) -> int:
        return 1

    def read_draws(self, words: Tensor) -> Tensor:
        return read_symmetric(words)

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        return scale_contrast(x, 1 + self.share * drawn.to(x.dtype))


@dataclass(frozen=True)
class Erase:
    """Sets a random rectangle of each image to 0 with the chance P (Zhong et al. 2020, arXiv:1708.04896).

    It has 2 to 33 % of the area and sides of a ratio from 0.3 to 3.3, and is cut off where it is longer than the image.
    """

    chance: float

    @property
    def words(self) -> int:
        return 5

    def read_draws(self, words: Tensor) -> Tensor:
        return read_uniform(words).unflatten(-1, (-1, 5))

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        chosen, area, ratio, top, left = drawn.to(x.dtype).unbind(-1)
        area = (0.02 + 0.31 * area) * height * width
        ratio = (log(0.3) + (log(3.3) - log(0.3)) * ratio).exp()
        inside = locate_box((area * ratio).sqrt(), (area / ratio).sqrt(), top, left, height, width)
        erased = inside & (chosen < self.chance)[:, None, None]
        return x.masked_fill(erased[:, None], 0)


def scale_contrast(x: Tensor, factor: Tensor) -> Tensor:
    """Images with their differences from their own mean times a factor each."""
    mean = x.mean((-3, -2, -1), keepdim=True)
    return mean + (x - mean) * spread_over_image(factor, x)


def spread_over_image(values: Tensor, x: Tensor) -> Tensor:
    """One value for each image in a shape that can be multiplied with the images."""
    return values.view(-1, *[1] * (x.dim() - 1))


def locate_box(tall: Tensor, wide: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """For each image, which pixels lie in its box: (images, height, width).

    Sides are in pixels, and are rounded; `top` and `left`, from 0 to 1, say where it lies within the image.
    """
    tall, wide = tall.round().clamp(1, height), wide.round().clamp(1, width)
    first_row, first_column = (top * (height - tall + 1)).floor(), (left * (width - wide + 1)).floor()
    rows = torch.arange(height, device=tall.device, dtype=tall.dtype)
    columns = torch.arange(width, device=tall.device, dtype=tall.dtype)
    in_rows = (rows >= first_row[:, None]) & (rows < (first_row + tall)[:, None])
    in_columns = (columns >= first_column[:, None]) & (columns < (first_column + wide)[:, None])
    return in_rows[:, :, None] & in_columns[:, None, :]
