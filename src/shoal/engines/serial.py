"""One device after another in this process: the reference that every other engine must agree with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.core.local.device import LocalTraining, TrainingSetup, prepare_training
from shoal.core.local.draws import LocalDraws
from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.result import finish_training
from shoal.core.local.step import LocalState, advance, compute_autograd_gradient
from shoal.engines.base import Task, TaskResult


class SerialEngine:
    """Trains the devices of a round in their order."""

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        return [train_device(task) for task in tasks]

    def close(self) -> None:
        pass


def train_device(task: Task) -> TaskResult:
    """One device from what it was sent to what it answers."""
    visit = prepare_training(task.site, task.job, task.memory)
    return TaskResult(*finish_training(task.site, visit, *run_local_steps(task.site, visit)))


def run_local_steps(site: TrainingSetup, visit: LocalTraining) -> tuple[LocalState, float, int]:
    """The whole local run: where it ends, its mean loss, and its multiply-accumulates."""
    rule, course, device, job = site.rule, visit.state, visit.device, visit.job
    luck, losses, macs = LocalDraws(site, visit), [], 0
    with seed_generator(site.streams.derive_seed("dropout", job.round, job.device), rule.net.place):
        for step, rows in enumerate(visit.rows):
            batch = device.samples.take_batch(rows)
            if site.augment:
                batch = batch._replace(
                    inputs=site.augment.transform_images(batch.inputs, luck.draw_for_images(len(rows)))
                )
            scene = visit.context_at_step(step, luck.draw_for_parts(step))
            done: list = []
            key = ("step", len(rows), visit.cost_key)
            with override_layers(rule.net.has_dropout, False, luck.draw_for_layer, None):
                macs += site.tally.run_and_count(
                    key, lambda: done.append(advance(rule, course, batch, scene, compute_autograd_gradient))
                )
            course, scored = done[0]
            losses.append(scored.loss)
    return course, float(torch.stack(losses).mean()), macs


@contextmanager
def seed_generator(number: int, place: torch.device) -> Iterator[None]:
    """What layers draw in other ways than dropout comes from a stream too; the global generator is left as it was."""
    own = torch.default_generator if place.type == "cpu" else torch.cuda.default_generators[place.index or 0]
    before = own.get_state()
    own.manual_seed(number)
    try:
        yield
    finally:
        own.set_state(before)
