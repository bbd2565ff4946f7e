"""A device about to train in a cohort: what it starts from, what it will draw, what it can share."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core import tree
from shoal.core.chance import chance
from shoal.core.counting import counted, kept
from shoal.core.device import Visit, prepare
from shoal.core.luck import Luck
from shoal.core.train import advance, autograd
from shoal.engines.crew import Task
from shoal.engines.knobs import Knob, skeleton


class Member:
    """A device about to train."""

    def __init__(self, task: Task):
        self.task, self.site = task, task.site
        self.visit: Visit = prepare(task.site, task.job, task.memory)
        self.luck = Luck(self.site, self.visit)
        self.first = self.luck.parts(0)
        scene = self.visit.scene
        self.fixed = [scene.anchor, scene.got, scene.numbers, scene.mask]

    @property
    def steps(self) -> int:
        return len(self.visit.rows)

    @property
    def sizes(self) -> list[int]:
        """How many samples each batch has."""
        return self.visit.rows.sizes

    def form(self, knobs: Sequence[Knob]) -> tuple:
        """All that must be equal for two devices to share a program and a cohort."""
        samples, kind = self.visit.device.samples, self.site.kind or id(self.site.net.module)
        course, scene = self.visit.course, self.visit.scene
        shapes = tree.outline([course.states, scene.got, self.first])
        like = self.site.net.shapes, tuple(scene.mask), tuple(course.velocity)
        return (kind, skeleton(self.site, knobs), id(samples.inputs), id(samples.targets), shapes, like)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole local run."""
        plan = kept(self.visit.job.plan)
        return sum(self.site.tally.known["step", size, plan] * many for size, many in Counter(self.sizes).items())

    def shapes(self, size: int) -> list[torch.Size]:
        """What the layers draw in a step with so many samples; tried once, and what a step costs is counted with it."""
        site, visit = self.site, self.visit
        key = ("step", size, kept(visit.job.plan))
        if key not in site.tally.known or (site.net.draws and key not in site.tally.drawn):
            index = visit.device.samples.index
            batch = visit.device.samples.batch(index.repeat(size // len(index) + 1)[:size])
            found: list[torch.Size] = []

            def uniform(shape: torch.Size) -> Tensor:
                found.append(shape)
                return torch.full(shape, 0.5)

            with chance(site.net.draws, False, uniform, None):
                scene = visit.scene_at(0, self.first)
                work = lambda: advance(site.rule, visit.course, batch, scene, autograd)  # noqa: E731
                macs = counted(work)
            site.tally.known.setdefault(key, macs)
            site.tally.drawn[key] = found
        return site.tally.drawn.get(key, [])
