"""The engine `serial`: one device after another in this process. Every other engine must agree with it."""

from collections.abc import Sequence

import torch

from shoal.core.local.device import LocalTraining, TrainingSetup, prepare_training
from shoal.core.local.draws import LocalDraws
from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.result import finish_training
from shoal.core.local.step import LocalState, advance, compute_autograd_gradient
from shoal.core.streams import seed_generator
from shoal.core.task import Task, TaskResult


class SerialEngine:
    """Trains the devices in the order of their tasks."""

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        return [train_device(task) for task in tasks]

    def close(self) -> None:
        pass


def train_device(task: Task) -> TaskResult:
    """The outcome of one device, from the message that it was sent to the reply."""
    training = prepare_training(task.setup, task.job, task.memory)
    return TaskResult(*finish_training(task.setup, training, *run_local_steps(task.setup, training)))


def run_local_steps(setup: TrainingSetup, training: LocalTraining) -> tuple[LocalState, float, int]:
    """All local steps of a device: its state after the last, the mean loss, and the multiply-accumulates."""
    rule, state, device, job = setup.rule, training.state, training.device, training.job
    draws, losses, macs = LocalDraws(setup, training), [], 0
    with seed_generator(setup.streams.derive_seed("dropout", job.round, job.device), rule.net.place):
        for step, rows in enumerate(training.rows):
            batch = device.samples.take_batch(rows)
            if setup.augment:
                batch = batch._replace(inputs=setup.augment.transform_images(batch.inputs, draws.get_image_draws(step)))
            context = training.context_at_step(step, draws.draw_for_parts(step))
            results: list = []
            key = ("step", len(rows), training.cost_key)
            with override_layers(rule.net.has_dropout, False, draws.draw_for_layer, None):
                macs += setup.tally.run_and_count(
                    key, lambda: results.append(advance(rule, state, batch, context, compute_autograd_gradient))
                )
            state, score = results[0]
            losses.append(score.loss)
    return state, float(torch.stack(losses).mean()), macs
