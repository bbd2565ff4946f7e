"""The inputs of every step of a stack: rows of the data set, sample weights, padding flags and random draws."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.phases import in_phase
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.step_draws import StepDraws

MOST_DRAWN_STEPS = 32
"""Steps whose random draws are made together where steps run one by one."""
MOST_DRAWN_BYTES = 2**24
"""Bytes that these draws take up at most, unless those of a single step take up more."""


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
        self.draws = StepDraws(slots, width, batch)

    @property
    def is_even(self) -> bool:
        """Whether every device takes every step with a whole batch."""
        return bool(self.full.all())

    def _find_full_steps(self) -> np.ndarray:
        """For each step, whether every device takes it with a whole batch."""
        found = np.full(self.steps, len(self.slots) == self.width)
        for slot in self.slots:
            found[slot.steps :] = False
            if min(slot.batch_sizes) < self.batch:
                found[: slot.steps] &= np.array(slot.batch_sizes) == self.batch
        return found

    def iterate_segments(self, steps: int, first: int, last: int, padded: bool) -> Iterator[InputSegment]:
        """The steps in pieces of so many, the last one filled up with idle ones; if one is padded, all are."""
        last += -(last - first) % steps
        own = [t.to(self.setup.net.place, non_blocking=True) for t in self.build_table(first, last, not padded)]
        own = [t[:, 0] if self.width == 1 else t for t in own]
        for begin in range(first, last, steps):
            piece = slice(begin - first, begin - first + steps)
            yield InputSegment(padded, [t[piece] for t in own] + self.stack_draws(begin, begin + steps))

    def iterate_steps(self, first: int = 0, last: int | None = None) -> Iterator[tuple[bool, list[Tensor]]]:
        """Step by step: whether it is padded, and its frame."""
        last, drawn = self.steps if last is None else last, []
        together = min(MOST_DRAWN_STEPS, max(1, MOST_DRAWN_BYTES // max(1, self.draws.bytes_per_step)))
        even = bool(self.full[first:last].all())
        own = [t.to(self.setup.net.place) for t in self.build_table(first, last, even)]
        columns = [(t[:, 0] if self.width == 1 else t).unbind() for t in own]
        for number, whole in enumerate(self.full[first:last].tolist()):
            row, place = [column[number] for column in columns], number % together
            if place == 0:
                drawn = self.stack_draws(first + number, min(first + number + together, last))
            yield not whole, [*(row if even or not whole else (row[0], *row[3:])), *(t[place] for t in drawn)]

    @in_phase("data")
    def build_table(self, first: int, last: int, even: bool) -> list[Tensor]:
        """Rows, weight, live, step and epoch of these steps; weight and live are left out where batches are whole."""
        dtype, total = self.setup.net.dtype, last - first
        step, schedules = torch.arange(first, last), [m.training.rows for m in self.slots]
        per_epoch = torch.tensor([s.per_epoch for s in schedules] + [1] * (self.width - len(schedules)))
        times = [t.to(dtype) for t in (step[:, None].expand(total, self.width), step[:, None] // per_epoch)]
        if even:
            return [torch.stack([s.table[first:last] for s in schedules], 1), *times]
        rows = schedules[0].table[0, 0].expand(total, self.width, self.batch).clone()
        weight = torch.zeros(total, self.width, self.batch, dtype=dtype)
        for lane, own in enumerate(schedules):
            taken = own.table[first:last]
            rows[: len(taken), lane, : own.batch_size] = taken
            counts = torch.tensor(own.sizes[first:last], dtype=torch.long)
            weight[: len(taken), lane] = (torch.arange(self.batch) < counts[:, None]).to(dtype)
        return [rows, weight, weight[..., 0] > 0, *times]

    @in_phase("data")
    def stack_draws(self, first: int, last: int) -> list[Tensor]:
        """What was drawn for some steps: by parts, for images, for layers."""
        return [t.to(self.setup.net.place, non_blocking=True) for t in self.draws.stack_steps(first, last)]
