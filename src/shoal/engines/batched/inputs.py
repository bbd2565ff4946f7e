"""The inputs of every step of a stack: rows of the data set, sample weights, padding flags and random draws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.core.phases import in_phase
from shoal.engines.batched.slot import DeviceSlot


@dataclass(frozen=True, eq=False)
class InputSegment:
    """The inputs of some steps: tensors with steps and devices as first dimensions, in the order of a program's inputs.

    They are rows, weight and live (only where something is padded), step, epoch, and the random draws.
    """

    padded: bool
    tensors: list[Tensor]

    def get_step(self, step: int) -> list[Tensor]:
        return [t[step] for t in self.tensors]


class StepInputs:
    """The inputs of all steps of a stack of `width` devices; for a single device that dimension is left out."""

    def __init__(self, slots: Sequence[DeviceSlot], width: int, batch: int):
        self.slots, self.width, self.batch = slots, width, batch
        self.setup = slots[0].setup
        self.steps = max(m.steps for m in slots)
        self.full = self._find_full_steps()
        for slot in slots:
            for size in {*slot.batch_sizes, *([batch] if self.setup.net.has_dropout else [])}:
                slot.find_draw_shapes(size)

    def _find_full_steps(self) -> np.ndarray:
        """For each step, whether every device takes it with a whole batch."""
        found = np.full(self.steps, len(self.slots) == self.width)
        for slot in self.slots:
            found[slot.steps :] = False
            if min(slot.batch_sizes) < self.batch:
                found[: slot.steps] &= np.array(slot.batch_sizes) == self.batch
        return found

    def iterate_segments(self, steps: int) -> Iterator[InputSegment]:
        """The local run in pieces of so many steps, the last one filled up; if anything is padded, all of it is."""
        total = self.steps + -self.steps % steps
        even = bool(self.full.all()) and total == self.steps
        own = [t.to(self.setup.net.place, non_blocking=True) for t in self.build_table(total, even)]
        own = [t[:, 0] if self.width == 1 else t for t in own]
        for first in range(0, total, steps):
            last = first + steps
            yield InputSegment(not even, [t[first:last] for t in own] + self.stack_draws(first, last))

    def iterate_steps(self) -> Iterator[tuple[bool, list[Tensor]]]:
        """Step by step: whether it is padded, and its frame."""
        even = bool(self.full.all())
        own = [t.to(self.setup.net.place) for t in self.build_table(self.steps, even)]
        columns = [(t[:, 0] if self.width == 1 else t).unbind() for t in own]
        for step, whole in enumerate(self.full.tolist()):
            row = [column[step] for column in columns]
            drawn = [t[0] for t in self.stack_draws(step, step + 1)]
            yield not whole, [*(row if even or not whole else (row[0], *row[3:])), *drawn]

    @in_phase("data")
    def build_table(self, total: int, even: bool) -> list[Tensor]:
        """Rows, weight, live, step and epoch; weight and live are left out where all batches are whole."""
        dtype = self.setup.net.dtype
        step, schedules = torch.arange(total), [m.training.rows for m in self.slots]
        per_epoch = torch.tensor([s.per_epoch for s in schedules] + [1] * (self.width - len(schedules)))
        times = [t.to(dtype) for t in (step[:, None].expand(total, self.width), step[:, None] // per_epoch)]
        if even:
            return [torch.stack([s.table for s in schedules], 1), *times]
        rows = schedules[0].table[0, 0].expand(total, self.width, self.batch).clone()
        weight = torch.zeros(total, self.width, self.batch, dtype=dtype)
        for lane, own in enumerate(schedules):
            rows[: len(own), lane, : own.batch_size] = own.table
            weight[: len(own), lane] = (torch.arange(self.batch) < torch.tensor(own.sizes)[:, None]).to(dtype)
        return [rows, weight, weight[..., 0] > 0, *times]

    @in_phase("data")
    def stack_draws(self, first: int, last: int) -> list[Tensor]:
        """What was drawn for some steps: by parts, for images, for layers."""
        if not (self.slots[0].first_draws or self.setup.augment or self.setup.net.has_dropout):
            return []
        steps = [
            self.stack_step_draws([self.draw_for_device(m, step) for m in self.slots]) for step in range(first, last)
        ]
        return [torch.stack(own).to(self.setup.net.place, non_blocking=True) for own in zip(*steps, strict=True)]

    def stack_step_draws(self, drawn: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The draws of one step for all devices."""
        if self.width == 1:
            return list(drawn[0])
        filled = [*drawn, *[drawn[0]] * (self.width - len(drawn))]
        return [torch.stack(own) for own in zip(*filled, strict=True)]

    def draw_for_device(self, slot: DeviceSlot, step: int) -> list[Tensor]:
        """One device's draws for one step, as wide as a whole batch; an idle step takes nothing from its streams."""
        live = step < slot.steps
        size = slot.batch_sizes[step] if live else self.batch
        parts = slot.local_draws.draw_for_parts(step) if live and step else slot.first_draws
        if live:
            images, layers = (
                slot.local_draws.draw_for_images(size),
                [slot.local_draws.draw_for_layer(shape) for shape in slot.find_draw_shapes(size)],
            )
        else:
            images = self.setup.augment.draw(torch.Generator(), size) if self.setup.augment else []
            layers = [torch.zeros(shape) for shape in slot.find_draw_shapes(size)] if self.setup.net.has_dropout else []
        images = [pad_to_shape(d, torch.Size((self.batch, *d.shape[1:]))) for d in images]
        shapes = slot.find_draw_shapes(self.batch) if layers else []
        missing = [torch.zeros(shape) for shape in shapes[len(layers) :]]  # of micro-batches that are padding
        layers = [pad_to_shape(d, shape) for d, shape in zip((*layers, *missing), shapes)]
        return [*tree.collect_tensors(parts), *images, *layers]


def pad_to_shape(tensor: Tensor, shape: torch.Size) -> Tensor:
    """With zeros behind, up to a shape."""
    if tensor.shape == shape:
        return tensor
    made = torch.zeros(shape, dtype=tensor.dtype)
    made[tuple(slice(n) for n in tensor.shape)] = tensor
    return made
