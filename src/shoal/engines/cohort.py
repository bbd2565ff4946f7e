"""Devices side by side: their tensors stacked, their batches padded, their idle steps gated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shoal.core import tree
from shoal.core.chance import chance
from shoal.core.counting import counted, kept
from shoal.core.device import Site, Visit, prepare
from shoal.core.luck import Luck
from shoal.core.train import Course, advance, autograd
from shoal.engines.crew import Task
from shoal.engines.knobs import Knob, skeleton, values


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

    @cached_property
    def sizes(self) -> list[int]:
        """How many samples each batch has."""
        return [len(rows) for rows in self.visit.rows]

    def form(self, knobs: Sequence[Knob]) -> tuple:
        """All that must be equal for two devices to share a program and a cohort."""
        samples, kind = self.visit.device.samples, self.site.kind or id(self.site.net.module)
        shapes = tree.outline([self.visit.course, self.fixed, self.first])
        return (kind, skeleton(self.site, knobs), id(samples.inputs), id(samples.targets), shapes)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the whole local run."""
        plan = kept(self.visit.job.plan)
        return sum(self.site.tally.known["step", size, plan] for size in self.sizes)

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


@dataclass(frozen=True, eq=False)
class Segment:
    """Some steps of a cohort: tensors with steps and lanes as first dimensions, in the order of a program's frame."""

    first: int
    steps: int
    padded: bool
    tensors: list[Tensor]


class Cohort:
    """Members of one form in one stack; its last lanes may be empty (they repeat the first member and never count).

    A member alone is not stacked at all: its program is that of one device.
    """

    def __init__(self, members: Sequence[Member], knobs: Sequence[Knob], width: int, batch: int):
        self.members, self.knobs, self.width, self.batch = list(members), tuple(knobs), width, batch
        first = self.members[0]
        self.site: Site = first.site
        self.samples = first.visit.device.samples
        self.place = self.site.net.place
        self.steps = max(m.steps for m in self.members)
        for member in self.members:
            for size in {*member.sizes, *([batch] if self.site.net.draws else [])}:
                member.shapes(size)

    @property
    def alone(self) -> bool:
        return self.width == 1

    def stack(self, trees: Sequence[Any]) -> list[Tensor]:
        """The members' tensors, each with the lanes as first dimension."""
        return [self.joined(own) for own in zip(*(tree.tensors(t) for t in trees), strict=True)]

    def joined(self, lanes: Sequence[Tensor]) -> Tensor:
        if self.alone:
            return laid(lanes[0].to(self.place, copy=True))
        return torch.stack([*lanes, *[lanes[0]] * (self.width - len(lanes))]).to(self.place)

    def carried(self) -> list[Tensor]:
        """Where the members stand before their first step."""
        return self.stack([m.visit.course for m in self.members])

    def fixed(self, read: Sequence[bool] | None = None) -> list[Tensor]:
        """What surrounds every step; of it, where a program says what it reads, only that."""
        lanes = [list(tree.tensors([m.fixed, values(m.site, self.knobs)])) for m in self.members]
        picked = range(len(lanes[0])) if read is None else [i for i, yes in enumerate(read) if yes]
        return [self.joined([own[i] for own in lanes]) for i in picked]

    def ends(self, carried: Sequence[Tensor]) -> list[Course]:
        """Where each member came to."""
        course = self.members[0].visit.course
        if self.alone:
            return [tree.refilled(course, (t.contiguous() for t in carried))]
        return [tree.refilled(course, (t[lane] for t in carried)) for lane in range(len(self.members))]

    # frames -------------------------------------------------------------------------------------------------------
    @cached_property
    def live(self) -> Tensor:
        """Steps x lanes: whether a lane has such a step."""
        steps = torch.tensor([m.steps for m in self.members] + [0] * (self.width - len(self.members)))
        return torch.arange(self.steps)[:, None] < steps

    @cached_property
    def table(self) -> list[Tensor]:
        """Rows, weights, live, step and epoch of all steps and lanes."""
        rows = torch.zeros(self.steps, self.width, self.batch, dtype=torch.long)
        weight = torch.zeros(self.steps, self.width, self.batch, dtype=self.site.net.dtype)
        epoch = torch.zeros(self.steps, self.width, dtype=self.site.net.dtype)
        for lane, member in enumerate(self.members):
            own = pad_sequence(member.visit.rows, batch_first=True)
            rows[: member.steps, lane, : own.shape[1]] = own
            weight[: member.steps, lane] = (torch.arange(self.batch) < torch.tensor(member.sizes)[:, None]).to(
                weight.dtype
            )
            epoch[:, lane] = torch.arange(self.steps) // member.visit.per_epoch
        for lane in range(len(self.members), self.width):
            rows[:, lane] = self.members[0].visit.rows[0][0]
        step = torch.arange(self.steps, dtype=epoch.dtype)[:, None].expand_as(epoch)
        return [rows, weight, self.live, step, epoch]

    @cached_property
    def full(self) -> Tensor:
        """Steps: whether every lane is live with a whole batch."""
        return self.live.all(1) & (self.table[1].flatten(1) > 0).all(1)

    def segments(self, steps: int, alike: bool) -> Iterator[Segment]:
        """The local run in pieces of so many steps, the last one filled up with idle ones where all must be alike."""
        placed = [
            t.to(self.place, non_blocking=True) for t in (self.filled(t, steps) if alike else t for t in self.table)
        ]
        whole = bool(self.full.all()) and len(self.full) % steps == 0
        for first in range(0, self.steps, steps):
            last = first + steps if alike else min(first + steps, self.steps)
            padded = not (whole if alike else bool(self.full[first:last].all()))
            own = [t[first:last] for t in placed]
            tensors = own if padded else [own[0], *own[3:]]
            drawn = self.drawn(first, last)
            if self.alone:
                tensors = [t[:, 0] for t in tensors]
            yield Segment(first, last - first, padded, [*tensors, *drawn])

    def filled(self, tensor: Tensor, steps: int) -> Tensor:
        """With idle steps at the end, up to a multiple."""
        idle = -len(tensor) % steps
        if not idle:
            return tensor
        return torch.cat(
            (
                tensor,
                tensor[-1:].expand(idle, *tensor.shape[1:])
                if tensor.dtype != torch.bool
                else torch.zeros(idle, *tensor.shape[1:], dtype=torch.bool),
            )
        )

    def drawn(self, first: int, last: int) -> list[Tensor]:
        """What was drawn for some steps: by parts, for images, for layers."""
        if not (self.members[0].first or self.site.augment or self.site.net.draws):
            return []
        steps = [[self.drawn_by(m, step) for m in self.members] for step in range(first, last)]
        found = []
        for own in zip(*(zip(*lanes, strict=True) for lanes in steps), strict=True):
            found.append(torch.stack([self.stacked(lanes) for lanes in own]).to(self.place, non_blocking=True))
        return found

    def stacked(self, lanes: Sequence[Tensor]) -> Tensor:
        return lanes[0] if self.alone else torch.stack([*lanes, *[lanes[0]] * (self.width - len(lanes))])

    def drawn_by(self, member: Member, step: int) -> list[Tensor]:
        """One member's draws for one step, as wide as a whole batch."""
        live = step < member.steps
        size = member.sizes[step if live else 0]
        parts = member.first if step == 0 or not live else member.luck.parts(step)
        if live:
            images = member.luck.images(size)
            layers = [member.luck.layer(shape) for shape in member.shapes(size)]
        else:
            images = member.site.augment.draw(torch.Generator(), size) if member.site.augment else []
            layers = [torch.zeros(shape) for shape in member.shapes(size)]
        images = [padded(d, torch.Size((self.batch, *d.shape[1:]))) for d in images]
        layers = [padded(d, shape) for d, shape in zip(layers, member.shapes(self.batch))]
        return [*tree.tensors(parts), *images, *layers]


def padded(tensor: Tensor, shape: torch.Size) -> Tensor:
    """With zeros behind, up to a shape."""
    if tensor.shape == shape:
        return tensor
    made = torch.zeros(shape, dtype=tensor.dtype)
    made[tuple(slice(n) for n in tensor.shape)] = tensor
    return made


def laid(tensor: Tensor) -> Tensor:
    """On a processor, images and filters are quicker with their channels last."""
    images = tensor.dim() == 4 and tensor.device.type == "cpu"
    return tensor.contiguous(memory_format=torch.channels_last) if images else tensor
