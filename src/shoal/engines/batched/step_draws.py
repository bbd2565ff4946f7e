"""The random draws of a stack's steps: what parts draw, what augmentation needs, the numbers of layers with dropout."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.engines.batched.slot import DeviceSlot


class StepDraws:
    """Draws with steps and lanes as first dimensions, as wide as a whole batch; where nothing is drawn there are zeros.

    A lane is a place in the stack. Steps must be asked for in their order, since streams go on from step to step.
    """

    def __init__(self, slots: Sequence[DeviceSlot], width: int, batch: int):
        self.slots, self.width, self.batch = slots, width, batch
        self.steps = max(slot.steps for slot in slots)
        self.setup = slots[0].setup

    def stack_steps(self, first: int, last: int) -> list[Tensor]:
        """All draws of some steps, in the order in which a step takes them; a single lane has no dimension."""
        drawn = [*self.stack_for_parts(first, last), *self.stack_for_images(first, last)]
        drawn += self.stack_for_layers(first, last)
        return [own[:, 0] if self.width == 1 else own for own in drawn]

    @cached_property
    def bytes_per_step(self) -> int:
        """What parts and layers draw for a step takes up; what augmentation needs is there for all steps anyway."""
        shapes = self.slots[0].find_draw_shapes(self.batch) if self.setup.net.has_dropout else []
        of_layers = sum(shape.numel() for shape in shapes) * torch.get_default_dtype().itemsize
        return self.width * (tree.count_tree_bytes(self.slots[0].first_draws) + of_layers)

    def stack_for_parts(self, first: int, last: int) -> list[Tensor]:
        """What parts draw for some steps; lanes without a device have the draws of the first one."""
        examples, count = tree.collect_tensors(self.slots[0].first_draws), len(self.slots)
        made = [t.new_empty(last - first, self.width, *t.shape) for t in examples]
        for step in range(first, last) if made else ():
            lanes = [self.draw_for_parts(slot, step) for slot in self.slots]
            for whole, own in zip(made, zip(*lanes, strict=True), strict=True):
                place = whole[step - first, :count]
                # a draw of another size than in the first step is refused: assigned as it is, it could be repeated
                place.copy_(torch.stack(own).view_as(place))
        for whole in made:
            whole[:, count:] = whole[:, :1]
        return made

    def draw_for_parts(self, slot: DeviceSlot, step: int) -> list[Tensor]:
        """What parts draw for a step; an idle one has the draws of the first, and takes nothing from the streams."""
        draws = slot.local_draws.draw_for_parts(step) if 0 < step < slot.steps else slot.first_draws
        return tree.collect_tensors(draws)

    def stack_for_images(self, first: int, last: int) -> list[Tensor]:
        return [
            own[first:last]
            if last <= self.steps
            else torch.cat([own[first:], own.new_zeros(last - self.steps, *own.shape[1:])])
            for own in self.image_draws
        ]

    @cached_property
    def image_draws(self) -> list[Tensor]:
        """What augmentation needs for all steps."""
        if not self.setup.augment:
            return []
        made = [
            t.new_zeros(self.steps, self.width, self.batch, *t.shape[2:]) for t in self.slots[0].local_draws.image_draws
        ]
        for lane, slot in enumerate(self.slots):
            for whole, own in zip(made, slot.local_draws.image_draws):
                whole[: own.shape[0], lane, : own.shape[1]] = own
        return made

    def stack_for_layers(self, first: int, last: int) -> list[Tensor]:
        if not self.setup.net.has_dropout:
            return []
        made = [torch.zeros(last - first, self.width, *shape) for shape in self.slots[0].find_draw_shapes(self.batch)]
        for lane, slot in enumerate(self.slots):
            for steps, size in find_runs(slot.batch_sizes[first:last]):
                shapes = slot.find_draw_shapes(size)
                numbers = slot.local_draws.draw_for_layers(len(steps), shapes)
                for whole, own in zip(made, numbers):
                    whole[(slice(steps.start, steps.stop), lane, *map(slice, own.shape[1:]))] = own
        return made


def find_runs(values: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Where one value stands several times in a row, and the value."""
    first = 0
    for value, run in groupby(values):
        last = first + len(list(run))
        yield range(first, last), value
        first = last
