"""Several devices as one: each of their tensors is stacked with the devices as first dimension."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.local.device import TrainingSetup
from shoal.core.local.result import LocalResult, end_training
from shoal.core.local.step import LocalState
from shoal.core.model import tree
from shoal.engines.batched.hyperparams import Hyperparam, read_hyperparams
from shoal.engines.batched.inputs import StepInputs
from shoal.engines.batched.slot import DeviceSlot


class DeviceStack:
    """Devices with one sharing key, padded to `width` (the padding repeats the first device, and is never read).

    A device alone is not stacked at all: its program is that of one device.
    """

    def __init__(
        self, members: Sequence[DeviceSlot], knobs: Sequence[Hyperparam], width: int, batch: int, turned: bool
    ):
        self.members, self.knobs, self.width, self.batch = list(members), tuple(knobs), width, batch
        first = self.members[0]
        self.site: TrainingSetup = first.site
        self.data = [first.visit.device.samples.inputs, first.visit.device.samples.targets]
        self.place = self.site.net.place
        self.turned = turned and width == 1 and self.place.type == "cpu"
        """Whether images and filters have their channels last, which is quicker on a processor."""
        self.frames = StepInputs(self.members, width, batch)

    @property
    def is_single(self) -> bool:
        return self.width == 1

    def stack_trees(self, trees: Sequence[Any]) -> list[Tensor]:
        """The members' tensors, each with the lanes as first dimension."""
        return [self.stack_tensors(own) for own in zip(*(tree.collect_tensors(t) for t in trees), strict=True)]

    def stack_tensors(self, lanes: Sequence[Tensor]) -> Tensor:
        if self.is_single:
            return self.apply_memory_format(lanes[0].to(self.place, copy=True))
        return torch.stack([*lanes, *[lanes[0]] * (self.width - len(lanes))]).to(self.place)

    def apply_memory_format(self, tensor: Tensor) -> Tensor:
        """As the cohort's program wants it."""
        images = self.turned and tensor.dim() == 4
        return tensor.contiguous(memory_format=torch.channels_last) if images else tensor

    def stack_initial_states(self) -> list[Tensor]:
        """Where the members stand before their first step."""
        return self.stack_trees([m.visit.state for m in self.members])

    def stack_constants(self, read: Sequence[bool] | None = None) -> list[Tensor]:
        """What surrounds every step; of it, where a program says what it reads, only that."""
        lanes = [tree.collect_tensors([m.fixed, read_hyperparams(m.site, self.knobs)]) for m in self.members]
        picked = range(len(lanes[0])) if read is None else [i for i, yes in enumerate(read) if yes]
        return [self.stack_tensors([own[i] for own in lanes]) for i in picked]

    def collect_results(self, carried: Sequence[Tensor]) -> tuple[list[LocalResult], list[bool]]:
        """What each member is about to send, and whether all of it is finite."""
        if not self.is_single and sends_plain_delta(self.site):
            return self.collect_deltas(carried)
        endings = [end_training(m.site, m.visit, course) for m, course in zip(self.members, self.split_states(carried))]
        return endings, tree.check_each_finite([[ending.body, ending.beside] for ending in endings])

    def collect_deltas(self, carried: Sequence[Tensor]) -> tuple[list[LocalResult], list[bool]]:
        """The same where no part acts after the last step: the changes of all lanes at once."""
        stacked: LocalState = tree.refill_tensors(self.members[0].visit.state, carried)
        values, anchors = stacked.params | stacked.buffers, [m.visit.context.anchor for m in self.members]
        names, sound = (
            self.site.net.names_with_role("shared"),
            torch.ones(self.width, dtype=torch.bool, device=self.place),
        )
        lanes = []
        for name in names:
            own = [anchor[name] for anchor in anchors]
            same = all(t is own[0] for t in own)
            change = values[name][: len(own)] - (own[0] if same else torch.stack(own))
            sound[: len(own)] &= change.reshape(len(own), -1).sum(1).isfinite()
            lanes.append(change.unbind())
        bodies = [dict(zip(names, own)) for own in zip(*lanes)]
        made = [LocalResult(body, {}, dict(m.visit.memory), m.visit.macs) for body, m in zip(bodies, self.members)]
        finite = sound.tolist()[: len(made)]
        return made, finite if all(finite) else tree.check_each_finite(bodies)

    def split_states(self, carried: Sequence[Tensor]) -> list[LocalState]:
        """Where each member came to."""
        course = self.members[0].visit.state
        if self.is_single:
            return [tree.refill_tensors(course, (t.contiguous() for t in carried))]
        lanes = zip(*(t.unbind() for t in carried)) if carried else [()] * self.width
        return [tree.refill_tensors(course, own) for _, own in zip(self.members, lanes)]


def sends_plain_delta(site: TrainingSetup) -> bool:
    """Whether a device sends its change as it is: no part acts after the last step, and nothing stays on the device."""
    method, net = site.method, site.net
    acting = method.parts_at("end") or method.parts_at("measure") or method.carries == "values"
    return not acting and not net.names_with_role("personal")
