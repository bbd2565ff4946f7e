"""The random numbers of one device's local training, step by step.

They depend on seed, round and device alone, and not on the engine or on the devices that are trained at the same time.
"""

import torch
from torch import Tensor

from shoal.core.local.device import LocalTraining, TrainingSetup


class LocalDraws:
    """Draws for parts, augmentation and dropout layers of one device in one round, each from its own stream."""

    def __init__(self, setup: TrainingSetup, training: LocalTraining):
        round, device = training.job.round, training.job.device
        self.setup = setup
        self._parts = [(part, training.device_for_part(part.name())) for part in setup.method.parts_at("draw")]
        self._generators = [local.generator("draw") for _, local in self._parts]
        self._images = setup.streams.make_torch_generator("augment", round, device) if setup.augment else None
        self._layers = setup.streams.make_torch_generator("dropout", round, device) if setup.net.has_dropout else None

    def draw_for_parts(self, step: int) -> dict[str, dict[str, Tensor]]:
        """By part: the named tensors that its `draw` returns for this step."""
        pairs = zip(self._parts, self._generators)
        return {part.name(): part.draw(generator, local, step) for (part, local), generator in pairs}

    def draw_for_images(self, count: int) -> list[Tensor]:
        """The tensors that augmentation needs for a batch of `count` images; none without augmentation."""
        return self.setup.augment.draw(self._images, count) if self.setup.augment and self._images else []

    def draw_for_layer(self, shape: torch.Size) -> Tensor:
        """Uniform numbers in [0, 1) for the next call of a dropout layer."""
        return torch.rand(shape, generator=self._layers)
