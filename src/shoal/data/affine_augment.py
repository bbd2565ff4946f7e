"""Augmentation of images by turning, slanting and zooming: every image by its own affine map, with zeros around it."""

from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.words import read_symmetric


@dataclass(frozen=True)
class Rotate:
    """Turns each image about its middle by a random angle, at most so many degrees either way."""

    degrees: float

    @property
    def words(self) -> int:
        return 1

    def read_draws(self, words: Tensor) -> Tensor:
        return read_symmetric(words)

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        return warp_images(x, make_rotation(drawn.to(x.dtype) * self.degrees * pi / 180))


@dataclass(frozen=True)
class Shear:
    """Slants each image sideways by a random angle, at most so many degrees either way."""

    degrees: float

    @property
    def words(self) -> int:
        return 1

    def read_draws(self, words: Tensor) -> Tensor:
        return read_symmetric(words)

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        slant = (drawn.to(x.dtype) * self.degrees * pi / 180).tan()
        zero, one = torch.zeros_like(slant), torch.ones_like(slant)
        return warp_images(x, stack_maps(one, slant, zero, one))


@dataclass(frozen=True)
class Zoom:
    """Enlarges or shrinks each image by a random factor from 1 - SHARE to 1 + SHARE."""

    share: float

    @property
    def words(self) -> int:
        return 1

    def read_draws(self, words: Tensor) -> Tensor:
        return read_symmetric(words)

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        scale = 1 / (1 + self.share * drawn.to(x.dtype))
        zero = torch.zeros_like(scale)
        return warp_images(x, stack_maps(scale, zero, zero, scale))


def make_rotation(angle: Tensor) -> Tensor:
    """The maps of turns by angles in radians."""
    return stack_maps(angle.cos(), -angle.sin(), angle.sin(), angle.cos())


def stack_maps(xx: Tensor, xy: Tensor, yx: Tensor, yy: Tensor) -> Tensor:
    """2 x 2 matrices, one for each image, from their entries."""
    return torch.stack((torch.stack((xx, xy), -1), torch.stack((yx, yy), -1)), -2)


def warp_images(x: Tensor, maps: Tensor, shift: Tensor | None = None) -> Tensor:
    """Images whose pixel at p, seen from the middle, is the pixel at `maps` p + `shift` of x, between pixels linearly.

    `maps` has a 2 x 2 matrix for each image and `shift` (columns, rows), all in pixels; what lies outside is 0.
    """
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device, dtype=x.dtype) - (height - 1) / 2
    columns = torch.arange(width, device=x.device, dtype=x.dtype) - (width - 1) / 2
    places = torch.stack((columns.expand(height, width), rows[:, None].expand(height, width)), -1)
    sources = torch.einsum("nij,hwj->nhwi", maps, places)
    if shift is not None:
        sources = sources + shift[:, None, None, :]
    half = torch.tensor((width / 2, height / 2), device=x.device, dtype=x.dtype)
    return F.grid_sample(x, sources / half, mode="bilinear", padding_mode="zeros", align_corners=False)
