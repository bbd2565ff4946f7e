"""The random numbers of one device's local training, step by step.

They depend on seed, round and device alone, and not on the engine or on the devices that are trained at the same time.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from shoal.core.local.device import LocalTraining, TrainingSetup


class LocalDraws:
    """Draws for parts, augmentation and dropout layers of one device in one round, each from its own stream."""

    def __init__(self, setup: TrainingSetup, training: LocalTraining):
        round, device = training.job.round, training.job.device
        self.setup, self.training = setup, training
        self._parts = [(part, training.device_for_part(part.name())) for part in setup.method.parts_at("draw")]
        self._generators = [local.generator("draw") for _, local in self._parts]
        self._layers = setup.streams.make_torch_generator("dropout", round, device) if setup.net.has_dropout else None

    def draw_for_parts(self, step: int) -> dict[str, dict[str, Tensor]]:
        """By part: the named tensors that its `draw` returns for this step."""
        pairs = zip(self._parts, self._generators)
        return {part.name(): part.draw(generator, local, step) for (part, local), generator in pairs}

    @cached_property
    def image_draws(self) -> list[Tensor]:
        """The tensors that augmentation needs, for all steps; a batch that is short is filled up with zeros."""
        augment, rows, job = self.setup.augment, self.training.rows, self.training.job
        if augment is None:
            return []
        words = self.setup.streams.draw_words(augment.words * sum(rows.sizes), "augment", job.round, job.device)
        return augment.read_draws(torch.from_numpy(words.astype("int64")), rows.sizes, rows.batch_size)

    def get_image_draws(self, step: int) -> list[Tensor]:
        """The tensors that augmentation needs for the batch of this step; none without augmentation."""
        return [drawn[step, : self.training.rows.sizes[step]] for drawn in self.image_draws]

    def draw_for_layer(self, shape: torch.Size) -> Tensor:
        """Uniform numbers in [0, 1) for the next call of a dropout layer."""
        return torch.rand(shape, generator=self._layers)

    def draw_for_layers(self, steps: int, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The same for some steps in which layers draw these shapes: for each layer, steps are the first dimension."""
        counts = [shape.numel() for shape in shapes]
        numbers = torch.rand(steps, sum(counts), generator=self._layers).split(counts, dim=1)
        return [own.reshape(steps, *shape) for own, shape in zip(numbers, shapes)]
