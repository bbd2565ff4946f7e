"""Devices side by side: their tensors in one stack, a lane for each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core import tree
from shoal.core.device import Site
from shoal.core.train import Course
from shoal.engines.frames import Frames
from shoal.engines.knobs import Knob, values
from shoal.engines.member import Member


class Cohort:
    """Members of one form in one stack; its last lanes may be empty (they repeat the first member and never count).

    A member alone is not stacked at all: its program is that of one device.
    """

    def __init__(self, members: Sequence[Member], knobs: Sequence[Knob], width: int, batch: int, turned: bool):
        self.members, self.knobs, self.width, self.batch = list(members), tuple(knobs), width, batch
        first = self.members[0]
        self.site: Site = first.site
        self.data = [first.visit.device.samples.inputs, first.visit.device.samples.targets]
        self.place = self.site.net.place
        self.turned = turned and width == 1 and self.place.type == "cpu"
        """Whether images and filters have their channels last, which is quicker on a processor."""
        self.frames = Frames(self.members, width, batch)

    @property
    def alone(self) -> bool:
        return self.width == 1

    def stack(self, trees: Sequence[Any]) -> list[Tensor]:
        """The members' tensors, each with the lanes as first dimension."""
        return [self.joined(own) for own in zip(*(tree.tensors(t) for t in trees), strict=True)]

    def joined(self, lanes: Sequence[Tensor]) -> Tensor:
        if self.alone:
            return self.laid(lanes[0].to(self.place, copy=True))
        return torch.stack([*lanes, *[lanes[0]] * (self.width - len(lanes))]).to(self.place)

    def laid(self, tensor: Tensor) -> Tensor:
        """As the cohort's program wants it."""
        images = self.turned and tensor.dim() == 4
        return tensor.contiguous(memory_format=torch.channels_last) if images else tensor

    def carried(self) -> list[Tensor]:
        """Where the members stand before their first step."""
        return self.stack([m.visit.course for m in self.members])

    def fixed(self, read: Sequence[bool] | None = None) -> list[Tensor]:
        """What surrounds every step; of it, where a program says what it reads, only that."""
        lanes = [tree.tensors([m.fixed, values(m.site, self.knobs)]) for m in self.members]
        picked = range(len(lanes[0])) if read is None else [i for i, yes in enumerate(read) if yes]
        return [self.joined([own[i] for own in lanes]) for i in picked]

    def ends(self, carried: Sequence[Tensor]) -> list[Course]:
        """Where each member came to."""
        course = self.members[0].visit.course
        if self.alone:
            return [tree.refilled(course, (t.contiguous() for t in carried))]
        lanes = zip(*(t.unbind() for t in carried)) if carried else [()] * self.width
        return [tree.refilled(course, own) for _, own in zip(self.members, lanes)]
