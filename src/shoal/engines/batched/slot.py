"""One device of a stack before its training: its state, its random draws, and what it must share with the others."""

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
    """One device, ready to train: its setup, local training and random draws."""

    def __init__(self, task: Task):
        self.task, self.site = task, task.setup
        self.visit: LocalTraining = prepare_training(task.setup, task.job, task.memory)
        self.luck = LocalDraws(self.site, self.visit)
        self.first = self.luck.draw_for_parts(0)
        context = self.visit.context
        self.fixed = [context.anchor, context.got, context.numbers, context.mask]

    @property
    def steps(self) -> int:
        return len(self.visit.rows)

    @property
    def batch_sizes(self) -> list[int]:
        """How many samples the batch of each step has."""
        return self.visit.rows.sizes

    def build_sharing_key(self, kind: int) -> tuple:
        """What must be equal for two devices to be stacked and share a program; `kind` is the number of the setup."""
        samples, state, context = self.visit.device.samples, self.visit.state, self.visit.context
        shapes = tree.outline_tree([state.states, context.got, self.first])
        return (kind, id(samples.inputs), id(samples.targets), shapes, tuple(context.mask), bool(state.velocity))

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all local steps."""
        cost_key = self.visit.cost_key
        if self.batch_sizes[0] == self.batch_sizes[-1] == min(self.batch_sizes):
            return self.site.tally.known["step", self.batch_sizes[0], cost_key] * self.steps
        return sum(
            self.site.tally.known["step", size, cost_key] * count for size, count in Counter(self.batch_sizes).items()
        )

    def find_draw_shapes(self, size: int) -> list[torch.Size]:
        """The shapes that dropout layers draw in a step with so many samples.

        One step is run to see them, and its multiply-accumulates are counted on the way.
        """
        site, visit = self.site, self.visit
        key = ("step", size, visit.cost_key)
        if key not in site.tally.known or (site.net.has_dropout and key not in site.tally.drawn):
            index = visit.device.samples.index
            batch = visit.device.samples.take_batch(index.repeat(size // len(index) + 1)[:size])
            shapes: list[torch.Size] = []

            def record_shape(shape: torch.Size) -> Tensor:
                shapes.append(shape)
                return torch.full(shape, 0.5)

            with override_layers(site.net.has_dropout, False, record_shape, None):
                context = visit.context_at_step(0, self.first)
                work = lambda: advance(site.rule, visit.state, batch, context, compute_autograd_gradient)  # noqa: E731
                macs = count_macs(work)
            site.tally.known.setdefault(key, macs)
            site.tally.drawn[key] = shapes
        return site.tally.drawn.get(key, [])
