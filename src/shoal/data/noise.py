"""Random data in the shape of real data sets, to try a recipe without their files; training on it means nothing."""

from collections.abc import Callable

import torch

from shoal.data.dataset import DATASETS, Dataset

SHAPES = {
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "svhn": ((3, 32, 32), 10),
    "tiny-imagenet": ((3, 64, 64), 200),
    "tiny-imagenet-32": ((3, 32, 32), 200),
}
TEXTS = ("ptb", "wikitext-2")
TRAIN, TEST = 400, 40
LENGTH, WORDS = 3, 50
"""Of the sequences; with those of a real text a language model would take its time for nothing."""


def build_image_noise(name: str, shape: tuple[int, ...], classes: int) -> Callable[[], Dataset]:
    """A function that makes random images: the same bytes every time, all classes equally often."""

    def make() -> Dataset:
        generator = torch.Generator().manual_seed(classes)
        images = torch.randint(0, 256, (TRAIN + TEST, *shape), dtype=torch.uint8, generator=generator)
        labels = torch.arange(TRAIN + TEST) % classes
        return Dataset(f"noise-{name}", images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:], classes)

    make.__doc__ = f"{TRAIN} images of noise in the shape of {name}, to try things out without its files."
    return make


def build_text_noise(name: str) -> Callable[[], Dataset]:
    """A function that makes random text: the same words every time, and for each the one that follows it."""

    def make() -> Dataset:
        generator = torch.Generator().manual_seed(WORDS)
        stream = torch.randint(0, WORDS, (TRAIN + TEST, LENGTH + 1), generator=generator)
        x, y = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
        return Dataset(f"noise-{name}", x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], WORDS)

    make.__doc__ = f"{TRAIN} sequences of {WORDS} words in the form of {name}, to try things out without its files."
    return make


NOISE = {f"noise-{name}": build_image_noise(name, shape, classes) for name, (shape, classes) in SHAPES.items()}
NOISE |= {f"noise-{name}": build_text_noise(name) for name in TEXTS}
DATASETS.update(NOISE)
