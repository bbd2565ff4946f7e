"""Augmentation of images, as a recipe names it; drawing and applying are separate, so that engines share draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.inputs import Inputs
from shoal.core.words import read_integers, read_uniform
from shoal.data.affine_augment import Rotate, Shear, Zoom
from shoal.data.colour_augment import Brightness, Contrast, Erase
from shoal.data.dataset import get_single_tensor
from shoal.data.rand_augment import STRONGEST, RandAugment


class AugmentStep(Protocol):
    """One kind of random change, which takes so many random `words` of 32 bits for each image.

    `read_draws` makes of the words of a batch, for every step at once, a row for each image, by which
    `transform_images` changes the images of a step.
    """

    @property
    def words(self) -> int: ...

    def read_draws(self, words: Tensor, /) -> Tensor: ...

    def transform_images(self, x: Tensor, drawn: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Flip:
    """Mirrors each image with probability 1/2."""

    @property
    def words(self) -> int:
        return 1

    def read_draws(self, words: Tensor) -> Tensor:
        return read_uniform(words) < 0.5

    def transform_images(self, x: Tensor, mirrored: Tensor) -> Tensor:
        return torch.where(mirrored.view(-1, *[1] * (x.dim() - 1)), x.flip(-1), x)


@dataclass(frozen=True)
class Crop:
    """Shifts each image by its own random number of pixels, and fills the border with 0."""

    pad: int

    @property
    def words(self) -> int:
        return 2

    def read_draws(self, words: Tensor) -> Tensor:
        return read_integers(words, 2 * self.pad + 1).unflatten(-1, (2, -1)).transpose(-1, -2)

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

    steps: tuple[AugmentStep, ...]

    @property
    def count(self) -> int:
        return len(self.steps)

    @property
    def words(self) -> int:
        return sum(step.words for step in self.steps)

    def read_draws(self, words: Tensor, sizes: Sequence[int], batch: int) -> list[Tensor]:
        """The draws of steps with batches of these sizes, each filled up to `batch` with zeros."""
        counts = torch.tensor(sizes)
        first_words = (counts.cumsum(0) - counts) * self.words
        draws: list[Tensor] = []
        for size in sorted(set(sizes), reverse=True):
            which = (counts == size).nonzero().flatten()
            own = words[first_words[which, None] + torch.arange(size * self.words)]
            pieces = own.split([step.words * size for step in self.steps], dim=-1)
            found = [step.read_draws(piece) for step, piece in zip(self.steps, pieces)]
            draws = draws or [t.new_zeros(len(sizes), batch, *t.shape[2:]) for t in found]
            for made, drawn in zip(draws, found):
                made[which, :size] = drawn
        return draws

    def transform_images(self, x: Tensor, drawn: list[Tensor]) -> Tensor:
        for step, own in zip(self.steps, drawn, strict=True):
            x = step.transform_images(x, own.to(x.device))
        return x


@dataclass(frozen=True)
class AugmentForm:
    """How a kind of augmentation is written: its class, and the lowest and highest value of each of its numbers."""

    make: Callable[..., AugmentStep]
    numbers: tuple[tuple[type, float, float], ...]
    form: str


AUGMENTATIONS = {
    "flip": AugmentForm(Flip, (), "flip"),
    "crop": AugmentForm(Crop, ((int, 1, 999),), "crop:PIXELS"),
    "rotate": AugmentForm(Rotate, ((float, 0, 180),), "rotate:DEGREES"),
    "shear": AugmentForm(Shear, ((float, 0, 80),), "shear:DEGREES"),
    "zoom": AugmentForm(Zoom, ((float, 0, 0.9),), "zoom:SHARE"),
    "brightness": AugmentForm(Brightness, ((float, 0, 1),), "brightness:SHARE"),
    "contrast": AugmentForm(Contrast, ((float, 0, 1),), "contrast:SHARE"),
    "erase": AugmentForm(Erase, ((float, 0, 1),), "erase:CHANCE"),
    "rand": AugmentForm(RandAugment, ((int, 1, 10), (float, 0, STRONGEST)), "rand:COUNT:STRENGTH"),
}
"""Kinds of augmentation by their names in recipes."""


def parse_augment(text: str) -> ImageAugmentation | None:
    """`flip`, `crop:4` (shift by up to 4 pixels), `rotate:15` and others, with + or commas between."""
    words = [word.strip() for word in text.replace("+", ",").split(",")]
    steps = tuple(parse_augment_step(word) for word in words if word)
    return ImageAugmentation(steps) if steps else None


def parse_augment_step(word: str) -> AugmentStep:
    """The augmentation that a word like `crop:4` names."""
    name, *given = word.split(":")
    known = AUGMENTATIONS.get(name)
    try:
        if known and len(given) == len(known.numbers):
            values = [kind(number) for number, (kind, _, _) in zip(given, known.numbers)]
            if all(low <= value <= high for value, (_, low, high) in zip(values, known.numbers)):
                return known.make(*values)
    except ValueError:
        pass
    wanted = describe_augment_form(known) if known else ", ".join(f.form for f in AUGMENTATIONS.values())
    advice = f"Write {wanted}; several with + between them." if not known else f"Write {wanted}."
    raise ShoalError("bad-value", f"The augmentation {word[:40]!r} cannot be read.", advice)


def describe_augment_form(known: AugmentForm) -> str:
    """How a kind of augmentation is written, with the ranges of its numbers."""
    ranges = [f"{low:g} to {high:g}" for _, low, high in known.numbers]
    return f"{known.form}, from {' and '.join(ranges)}" if ranges else known.form


def refuse_augmenting(inputs: Inputs) -> None:
    """Refuse augmentation of what is no batch of images."""
    tensor = get_single_tensor(inputs, "augment")
    if tensor.dim() != 4:
        raise ShoalError(
            "bad-value",
            f"augment is for images, and the data has samples of shape {tuple(tensor.shape[1:])}.",
            "Leave augment out, or give images as (channels, height, width).",
        )
