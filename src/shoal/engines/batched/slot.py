"""One device of a stack before its training: its state, its random draws, and what it must share with the others."""

from collections import Counter

import torch
from torch import Tensor

from shoal.core.local.device import LocalTraining, TrainingSetup, prepare_training
from shoal.core.local.draws import LocalDraws
from shoal.core.local.layer_overrides import override_layers
from shoal.core.local.step import advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.flops import count_macs
from shoal.core.model.made_bytes import count_made_bytes
from shoal.core.task import Task


class DeviceSlot:
    """One device, ready to train: its setup, local training and random draws.

    With `pads_extras` parts pad what they were sent, so that devices which were sent different shapes can be stacked.
    """

    def __init__(self, task: Task, pads_extras: bool = False):
        self.task, self.setup, self.pads_extras = task, task.setup, pads_extras
        self.training: LocalTraining = prepare_training(task.setup, task.job, task.memory)
        self.batch_sizes: list[int] = self.training.rows.sizes
        """How many samples the batch of each step has."""
        self.steps = len(self.batch_sizes)
        self.local_draws = LocalDraws(self.setup, self.training)
        self.first_draws = self.local_draws.draw_for_parts(0)
        context = self.training.context
        self.got = pad_extras_of_parts(self.setup, context.got) if pads_extras else context.got
        """By part: what was sent beside the model, as the steps of a stack see it."""
        self.fixed = [context.anchor, self.got, context.numbers, context.mask]

    def build_sharing_key(self, kind: int) -> tuple:
        """What must be equal for two devices to be stacked and share a program; `kind` is the number of the setup."""
        samples, state, mask = self.training.device.samples, self.training.state, self.training.context.mask
        shapes = tree.outline_tree([state.states, self.got, self.first_draws])
        data = tuple(map(id, tree.collect_tensors([samples.inputs, samples.targets])))
        return (kind, data, shapes, tuple(mask), tuple(state.slots))

    def identify_origin(self) -> tuple[int, ...]:
        """What the sharing key is made of, by identity: slots of one round that agree in it have the same key."""
        samples, training = self.training.device.samples, self.training
        own = (self.setup, samples.inputs, samples.targets, training.state, training.context, self.first_draws or None)
        return tuple(map(id, own))

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all local steps."""
        cost_key = self.training.cost_key
        if self.batch_sizes[0] == self.batch_sizes[-1] == min(self.batch_sizes):
            return self.setup.tally.known["step", self.batch_sizes[0], cost_key] * self.steps
        return sum(
            self.setup.tally.known["step", size, cost_key] * count for size, count in Counter(self.batch_sizes).items()
        )

    def bound_peak_bytes(self) -> int:
        """More bytes than a step of this device alone can hold at its peak; 0 where that step was not counted."""
        if self.got is not self.training.context.got:
            return 0
        size = max(self.batch_sizes)
        self.find_draw_shapes(size)
        made = self.setup.tally.made_bytes.get(("step", size, self.training.cost_key), 0)
        kept = tree.count_tree_bytes([tree.collect_tensors(self.training.state), self.fixed])
        return 2 * made + 3 * kept if made else 0

    def find_draw_shapes(self, size: int) -> list[torch.Size]:
        """The shapes that dropout layers draw in a step with so many samples.

        One step is run to see them, and its multiply-accumulates are counted on the way.
        """
        setup, training = self.setup, self.training
        key = ("step", size, training.cost_key)
        if key not in setup.tally.known or (setup.net.has_dropout and key not in setup.tally.drawn):
            index = training.device.samples.index
            batch = training.device.samples.take_batch(index.repeat(size // len(index) + 1)[:size])
            shapes: list[torch.Size] = []

            def record_shape(shape: torch.Size) -> Tensor:
                shapes.append(shape)
                return torch.full(shape, 0.5)

            with override_layers(setup.net.has_dropout, False, record_shape, None):
                context = training.context_at_step(0, self.first_draws)
                work = lambda: advance(setup.rule, training.state, batch, context, compute_autograd_gradient)  # noqa: E731
                macs, made_bytes = count_made_bytes(lambda: count_macs(work))
            setup.tally.known.setdefault(key, macs)
            setup.tally.drawn[key], setup.tally.made_bytes[key] = shapes, made_bytes
        return setup.tally.drawn.get(key, [])


def pad_extras_of_parts(setup: TrainingSetup, got: dict[str, dict]) -> dict[str, dict]:
    """What parts were sent, with `pad_extras` of those that have it.

    Not where layers draw random numbers: how many they draw, and in which order, follows from what was sent.
    """
    padding = [part for part in setup.method.parts if part.name() in got and part.acts_at("pad_extras")]
    if not padding or setup.net.has_dropout:
        return got
    return got | {part.name(): part.pad_extras(got[part.name()], setup.net) for part in padding}
