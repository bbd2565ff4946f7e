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
        self,
        slots: Sequence[DeviceSlot],
        hyperparams: Sequence[Hyperparam],
        width: int,
        batch: int,
        channels_last: bool,
    ):
        self.slots, self.hyperparams, self.width, self.batch = list(slots), tuple(hyperparams), width, batch
        first = self.slots[0]
        self.setup: TrainingSetup = first.setup
        samples = first.training.device.samples
        self.data = [*tree.collect_tensors(samples.inputs), samples.targets, *self.setup.net.frozen.values()]
        self.place = self.setup.net.place
        self.channels_last = channels_last and width == 1 and self.place.type == "cpu"
        """Whether images and filters have their channels last, which is quicker on a processor."""
        self.step_inputs = StepInputs(self.slots, width, batch)

    def take_first(self, count: int, width: int) -> "DeviceStack":
        """The first devices alone, in a stack of this width."""
        return DeviceStack(self.slots[:count], self.hyperparams, width, self.batch, self.channels_last)

    @property
    def is_single(self) -> bool:
        return self.width == 1

    @property
    def uses_autograd(self) -> bool:
        """Whether gradients are autograd's, which has a single operation for the gradient of an LSTM on a processor."""
        return self.is_single and self.place.type == "cpu"

    def stack_trees(self, trees: Sequence[Any]) -> list[Tensor]:
        """The devices' tensors, each stacked with the devices as first dimension.

        Devices that start alike share a tree, of which the tensors are looked up once.
        """
        distinct = {id(own): own for own in trees}
        numbers = {key: number for number, key in enumerate(distinct)}
        which = [numbers[id(own)] for own in trees]
        device_tensors = zip(*(tree.collect_tensors(own) for own in distinct.values()), strict=True)
        return [self.stack_tensors(own, which) for own in device_tensors]

    def stack_tensors(self, distinct: Sequence[Tensor], which: Sequence[int]) -> Tensor:
        """For each device the tensor of this number."""
        if self.is_single:
            return self.apply_memory_format(distinct[0].to(self.place, copy=True))
        tensors = [distinct[number] for number in which]
        return torch.stack(tensors + [tensors[0]] * (self.width - len(tensors))).to(self.place)

    def apply_memory_format(self, tensor: Tensor) -> Tensor:
        """The tensor in the memory format that the program wants."""
        images = self.channels_last and tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if images else tensor

    def stack_initial_states(self) -> list[Tensor]:
        """The local states before the first step."""
        return self.stack_trees([m.training.state for m in self.slots])

    def stack_constants(self, read: Sequence[bool] | None = None) -> list[Tensor]:
        """The tensors that no step changes; where a program says which it reads, only those."""
        distinct: dict[tuple[int, int], int] = {}
        which = [distinct.setdefault((id(m.training.context), id(m.setup)), len(distinct)) for m in self.slots]
        first_slots = [self.slots[which.index(number)] for number in range(len(distinct))]
        device_tensors = [
            tree.collect_tensors([m.fixed, read_hyperparams(m.setup, self.hyperparams)]) for m in first_slots
        ]
        picked = range(len(device_tensors[0])) if read is None else [i for i, yes in enumerate(read) if yes]
        return [self.stack_tensors([own[i] for own in device_tensors], which) for i in picked]

    def collect_results(self, carried: Sequence[Tensor]) -> tuple[list[LocalResult], list[bool]]:
        """What each device is about to send, and whether all of it is finite."""
        if not self.is_single and sends_plain_delta(self.setup):
            return self.collect_deltas(carried)
        results = [end_training(m.setup, m.training, state) for m, state in zip(self.slots, self.split_states(carried))]
        return results, tree.check_each_finite([[result.body, result.beside] for result in results])

    def collect_deltas(self, carried: Sequence[Tensor]) -> tuple[list[LocalResult], list[bool]]:
        """The same where no part acts after the last step: all changes at once, in place of the devices' values."""
        stacked: LocalState = tree.refill_tensors(self.slots[0].training.state, carried)
        values, count = stacked.params | stacked.buffers, len(self.slots)
        names = self.setup.net.names_with_role("shared")
        ranges = find_equal_ranges([m.training.context.anchor for m in self.slots])
        sound, device_tensors = torch.ones(count, dtype=torch.bool, device=self.place), []
        for name in names:
            change = values[name].contiguous()[:count]
            for first, last, anchor in ranges:
                change[first:last].sub_(anchor[name])
            sound &= change.reshape(count, -1).sum(1).isfinite()
            device_tensors.append(change.unbind())
        bodies = [dict(zip(names, own)) for own in zip(*device_tensors)]
        made = [LocalResult(body, {}, dict(m.training.memory), m.training.macs) for body, m in zip(bodies, self.slots)]
        finite = sound.tolist()
        return made, finite if all(finite) else tree.check_each_finite(bodies)

    def split_states(self, carried: Sequence[Tensor]) -> list[LocalState]:
        """The local state of each device after its last step."""
        state = self.slots[0].training.state
        if self.is_single:
            return [tree.refill_tensors(state, (t.contiguous() for t in carried))]
        device_tensors = zip(*(t.unbind() for t in carried)) if carried else [()] * self.width
        return [tree.refill_tensors(state, own) for _, own in zip(self.slots, device_tensors)]


def sends_plain_delta(setup: TrainingSetup) -> bool:
    """Whether a device sends its change as it is: no part acts after the last step, and nothing stays on the device."""
    method, net = setup.method, setup.net
    acting = method.parts_at("end") or method.parts_at("measure") or method.carries == "values" or method.keeps_slots
    return not acting and not net.names_with_role("personal")


def find_equal_ranges(values: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """Where the same object stands several times in a row: its first place, the place after its last, and itself."""
    ranges: list[tuple[int, int, Any]] = []
    for place, value in enumerate(values):
        if ranges and ranges[-1][2] is value:
            ranges[-1] = (ranges[-1][0], place + 1, value)
        else:
            ranges.append((place, place + 1, value))
    return ranges
