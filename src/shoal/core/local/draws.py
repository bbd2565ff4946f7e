"""The random numbers of one device's local run, step by step: the same whoever trains it, and beside whomever."""

import torch
from torch import Tensor

from shoal.core.local.device import Site, Visit


class Luck:
    """What parts, augmentation and layers draw; each from a stream of its own."""

    def __init__(self, site: Site, visit: Visit):
        round, device = visit.job.round, visit.job.device
        self.site = site
        self._parts = [(part, visit.at(part.name())) for part in site.method.at("draw")]
        self._generators = [local.generator("draw") for _, local in self._parts]
        self._images = site.streams.torch("augment", round, device) if site.augment else None
        self._layers = site.streams.torch("dropout", round, device) if site.net.draws else None

    def parts(self, step: int) -> dict[str, dict[str, Tensor]]:
        """By part: what its `draw` drew for this step."""
        drawing = zip(self._parts, self._generators)
        return {part.name(): part.draw(generator, local, step) for (part, local), generator in drawing}

    def images(self, count: int) -> list[Tensor]:
        """What augmentation does to a batch of so many."""
        return self.site.augment.draw(self._images, count) if self.site.augment and self._images else []

    def layer(self, shape: torch.Size) -> Tensor:
        """Numbers between 0 and 1 for the next dropout layer."""
        return torch.rand(shape, generator=self._layers)
