"""One device after another in this process: the reference that every other engine must agree with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.core.local.device import Site, Visit, finish, prepare
from shoal.core.local.draws import Luck
from shoal.core.local.layer_overrides import chance
from shoal.core.local.step import Course, advance, autograd
from shoal.engines.base import Done, Task


class Serial:
    """Trains the devices of a round in their order."""

    def train(self, tasks: Sequence[Task]) -> list[Done]:
        return [alone(task) for task in tasks]

    def close(self) -> None:
        pass


def alone(task: Task) -> Done:
    """One device from what it was sent to what it answers."""
    visit = prepare(task.site, task.job, task.memory)
    return Done(*finish(task.site, visit, *train(task.site, visit)))


def train(site: Site, visit: Visit) -> tuple[Course, float, int]:
    """The whole local run: where it ends, its mean loss, and its multiply-accumulates."""
    rule, course, device, job = site.rule, visit.course, visit.device, visit.job
    luck, losses, macs = Luck(site, visit), [], 0
    with seeded(site.streams.number("dropout", job.round, job.device), rule.net.place):
        for step, rows in enumerate(visit.rows):
            batch = device.samples.batch(rows)
            if site.augment:
                batch = batch._replace(inputs=site.augment.turned(batch.inputs, luck.images(len(rows))))
            scene = visit.scene_at(step, luck.parts(step))
            done: list = []
            key = ("step", len(rows), visit.form)
            with chance(rule.net.draws, False, luck.layer, None):
                macs += site.tally.of(key, lambda: done.append(advance(rule, course, batch, scene, autograd)))
            course, scored = done[0]
            losses.append(scored.loss)
    return course, float(torch.stack(losses).mean()), macs


@contextmanager
def seeded(number: int, place: torch.device) -> Iterator[None]:
    """What layers draw in other ways than dropout comes from a stream too; the global generator is left as it was."""
    own = torch.default_generator if place.type == "cpu" else torch.cuda.default_generators[place.index or 0]
    before = own.get_state()
    own.manual_seed(number)
    try:
        yield
    finally:
        own.set_state(before)
