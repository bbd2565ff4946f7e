"""The random numbers of one device's local run, step by step: the same whoever trains it, and beside whomever."""

import torch
from torch import Tensor

from shoal.core.local.device import LocalTraining, TrainingSetup


class LocalDraws:
    """What parts, augmentation and layers draw; each from a stream of its own."""

    def __init__(self, site: TrainingSetup, visit: LocalTraining):
        round, device = visit.job.round, visit.job.device
        self.site = site
        self._parts = [(part, visit.device_for_part(part.name())) for part in site.method.parts_at("draw")]
        self._generators = [local.generator("draw") for _, local in self._parts]
        self._images = site.streams.make_torch_generator("augment", round, device) if site.augment else None
        self._layers = site.streams.make_torch_generator("dropout", round, device) if site.net.has_dropout else None

    def draw_for_parts(self, step: int) -> dict[str, dict[str, Tensor]]:
        """By part: what its `draw` drew for this step."""
        drawing = zip(self._parts, self._generators)
        return {part.name(): part.draw(generator, local, step) for (part, local), generator in drawing}

    def draw_for_images(self, count: int) -> list[Tensor]:
        """What augmentation does to a batch of so many."""
        return self.site.augment.draw(self._images, count) if self.site.augment and self._images else []

    def draw_for_layer(self, shape: torch.Size) -> Tensor:
        """Numbers between 0 and 1 for the next dropout layer."""
        return torch.rand(shape, generator=self._layers)
