"""RandAugment (Cubuk et al. 2020, arXiv:1909.13719): a few operations of one strength, drawn anew for each image."""

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from shoal.core.words import read_integers
from shoal.data.affine_augment import make_rotation, stack_maps, warp_images
from shoal.data.colour_augment import scale_contrast, spread_over_image

OPERATIONS = ("identity", "rotate", "shear_x", "shear_y", "shift_x", "shift_y", "brightness", "contrast")
"""What is drawn from: the operations of the paper that mean something for values of any range.

Left out are those on values from 0 to 255: colour, sharpness, posterize, solarize, autocontrast, equalize.
"""
STRONGEST = 30
"""The largest strength: 30 degrees, slants of 0.3, shifts by a third of the image, factors from 0.1 to 1.9."""


@dataclass(frozen=True)
class RandAugment:
    """COUNT operations of STRENGTH 0 to 30 for each image, each drawn from eight, with a random sign."""

    count: int
    strength: float

    @property
    def words(self) -> int:
        return 2 * self.count

    def read_draws(self, words: Tensor) -> Tensor:
        """For each image and operation: which one, and its sign."""
        which, signs = words.unflatten(-1, (2, -1, self.count)).unbind(-3)
        return torch.stack((read_integers(which, len(OPERATIONS)), 2 * read_integers(signs, 2) - 1), -1)

    def transform_images(self, x: Tensor, drawn: Tensor) -> Tensor:
        for which, sign in (layer.unbind(-1) for layer in drawn.unbind(1)):
            x = self.apply_operation(x, which, sign.to(x.dtype) * (self.strength / STRONGEST))
        return x

    def apply_operation(self, x: Tensor, which: Tensor, strength: Tensor) -> Tensor:
        """One operation for each image: affine maps, shifts and factors that do nothing where another was drawn."""
        height, width = x.shape[-2:]
        rotate, shear_x, shear_y, shift_x, shift_y, brightness, contrast = (
            torch.where(which == number, strength, torch.zeros_like(strength)) for number in range(1, len(OPERATIONS))
        )
        one = torch.ones_like(strength)
        maps = make_rotation(rotate * (30 * pi / 180)) @ stack_maps(one, 0.3 * shear_x, 0.3 * shear_y, one)
        warped = warp_images(x, maps, torch.stack((shift_x * (width / 3), shift_y * (height / 3)), -1))
        x = torch.where(spread_over_image((which >= 1) & (which <= 5), x), warped, x)
        return scale_contrast(x * spread_over_image(1 + 0.9 * brightness, x), 1 + 0.9 * contrast)
