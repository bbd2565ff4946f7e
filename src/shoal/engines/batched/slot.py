"""A device about to train in a cohort: what it starts from, what it will draw, what it can share."""

from collections import Counter

import torch
from torch import Tensor

from shoal.core.local.device import LocalTraining, prepare_training
from shoal.core.local.draws import LocalDraws
from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.step import advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.flops import count_macs
from shoal.engines.base import Task


class DeviceSlot:
    """A device about to train."""

    def __init__(self, task: Task):
        self.task, self.site = task, task.site
        self.visit: LocalTraining = prepare_training(task.site, task.job, task.memory)
        self.luck = LocalDraws(self.site, self.visit)
        self.first = self.luck.draw_for_parts(0)
        scene = self.visit.context
        self.fixed = [scene.anchor, scene.got, scene.numbers, scene.mask]

    @property
    def steps(self) -> int:
        return len(self.visit.rows)

    @property
    def batch_sizes(self) -> list[int]:
        """How many samples each batch has."""
        return self.visit.rows.sizes

    def build_sharing_key(self, kind: int) -> tuple:
        """All that must be equal for two devices of sites of one kind to share a program and a cohort."""
        samples, course, scene = self.visit.device.samples, self.visit.state, self.visit.context
        shapes = tree.outline_tree([course.states, scene.got, self.first])
        return (kind, id(samples.inputs), id(samples.targets), shapes, tuple(scene.mask), bool(course.velocity))

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole local run."""
        form = self.visit.cost_key
        if self.batch_sizes[0] == self.batch_sizes[-1] == min(self.batch_sizes):
            return self.site.tally.known["step", self.batch_sizes[0], form] * self.steps
        return sum(self.site.tally.known["step", size, form] * many for size, many in Counter(self.batch_sizes).items())

    def find_draw_shapes(self, size: int) -> list[torch.Size]:
        """What the layers draw in a step with so many samples; tried once, and what a step costs is counted with it."""
        site, visit = self.site, self.visit
        key = ("step", size, visit.cost_key)
        if key not in site.tally.known or (site.net.has_dropout and key not in site.tally.drawn):
            index = visit.device.samples.index
            batch = visit.device.samples.take_batch(index.repeat(size // len(index) + 1)[:size])
            found: list[torch.Size] = []

            def record_shape(shape: torch.Size) -> Tensor:
                found.append(shape)
                return torch.full(shape, 0.5)

            with override_layers(site.net.has_dropout, False, record_shape, None):
                scene = visit.context_at_step(0, self.first)
                work = lambda: advance(site.rule, visit.state, batch, scene, compute_autograd_gradient)  # noqa: E731
                macs = count_macs(work)
            site.tally.known.setdefault(key, macs)
            site.tally.drawn[key] = found
        return site.tally.drawn.get(key, [])
