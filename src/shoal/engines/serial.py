"""One device after another in this process: the reference that every other engine must agree with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.counting import Tally, kept
from shoal.core.device import Site, Visit, finish, prepare
from shoal.core.net import Net
from shoal.core.plan import Plan
from shoal.core.train import Course, advance, autograd
from shoal.core.types import Job, Outcome
from shoal.memory import Memory


class Serial:
    """Trains the devices of a round in their order."""

    def __init__(self, site: Site, memory: Memory):
        self.site = site
        self.memory = memory

    def fit(self, jobs: Sequence[Job]) -> list[Outcome]:
        outcomes = []
        for job in jobs:
            visit = prepare(self.site, job, self.memory.get(job.device))
            course, loss, macs = train(self.site, visit)
            outcome, memory = finish(self.site, visit, course, loss, macs)
            if outcome.message is not None:
                self.memory.put(job.device, memory)
            outcomes.append(outcome)
        return outcomes

    def enrol(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        return {d: self.site.enrol(d) for d in devices}

    def resize(self, net: Net, plan: Plan) -> None:
        self.memory.cut(self.site.net.slicer, plan)
        self.site = replace(self.site, net=net, tally=Tally())


def train(site: Site, visit: Visit) -> tuple[Course, float, int]:
    """The whole local run: where it ends, its mean loss, and its multiply-accumulates."""
    rule, course, device = site.rule, visit.course, visit.device
    own, job = site.streams, visit.job
    drawing = [(part, visit.at(part.name())) for part in site.method.at("draw")]
    generators = {part.name(): local.generator("draw") for part, local in drawing}
    augmenting = own.torch("augment", job.round, job.device) if site.augment else None
    losses, macs = [], 0
    with seeded(own.number("dropout", job.round, job.device), rule.net.place):
        for step, rows in enumerate(visit.rows):
            batch = device.samples.batch(rows)
            if site.augment and augmenting is not None:
                batch = site.augment(batch, augmenting)
            draws = {part.name(): part.draw(generators[part.name()], local, step) for part, local in drawing}
            scene = visit.scene_at(step, draws)
            done: list = []
            key = ("step", len(rows), kept(job.plan))
            macs += site.tally.of(key, lambda: done.append(advance(rule, course, batch, scene, autograd)))
            course, scored = done[0]
            losses.append(scored.loss)
    return course, float(torch.stack(losses).mean()), macs


@contextmanager
def seeded(number: int, place: torch.device) -> Iterator[None]:
    """What layers of the model draw by themselves comes from a stream of its own; the global one is left as it was."""
    own = torch.default_generator if place.type == "cpu" else torch.cuda.default_generators[place.index or 0]
    before = own.get_state()
    own.manual_seed(number)
    try:
        yield
    finally:
        own.set_state(before)
