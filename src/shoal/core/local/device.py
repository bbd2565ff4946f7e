"""A device before its first local step: decode what was sent, choose data, draw batches, `begin` of each part."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from shoal.core import wire
from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.local.schedule import BatchSchedule, make_schedule
from shoal.core.local.step import LocalState, StepContext, StepRule
from shoal.core.model import tree
from shoal.core.model.flops import FlopCache, make_mask_key
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.optimiser import Optimiser
from shoal.core.streams import RandomStreams
from shoal.core.telling import TOLD
from shoal.core.types import SERVER, Device, Job
from shoal.core.wire import CodecLink

PERSONAL_KEY = ".personal"
"""The key of personal tensors in a device's memory; the dot keeps it apart from names of parts."""
SLOTS_KEY = ".optimiser"
"""The key of the optimiser's state in a device's memory, where a part keeps it."""


class Augmenter(Protocol):
    """Random changes of images. `count` is the number of tensors that `draw` returns and `transform_images` takes."""

    @property
    def count(self) -> int: ...

    def draw(self, generator: torch.Generator, images: int, /) -> list[Tensor]: ...

    def transform_images(self, x: Tensor, drawn: list[Tensor], /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """What all devices of a run share and what changes only when the model is pruned: method, net, optimiser, data."""

    method: Method
    net: Net
    streams: RandomStreams
    optimiser: Optimiser
    samples: Callable[[int], Samples]
    """Device number -> its training samples; the server's for the number `SERVER`."""
    augment: Augmenter | None = None
    tally: FlopCache = field(default_factory=FlopCache)
    kind: str = ""
    """Setups of the same kind have the same model apart from the values of its tensors; "": no other setup has."""

    @property
    def rule(self) -> StepRule:
        return StepRule(self.net, self.method, self.optimiser)

    def enrol(self, device: int) -> dict[str, Tensor]:
        """The enrolment card of a device: named tensors that it sends once, when it is first asked."""
        card: dict[str, Tensor] = {}
        for part in self.method.parts_at("enrol"):
            card = part.enrol(card, self.samples(device), self.net)
        return card


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """One device in one round, ready for its first local step."""

    job: Job
    device: Device
    memory: dict[str, Tree]
    state: LocalState
    context: StepContext
    rows: BatchSchedule
    got: dict[str, dict]
    """By part: the tensors that its `send` put beside the model, requests included."""
    macs: int
    """Multiply-accumulates spent at `begin`."""

    def device_for_part(self, part: str) -> Device:
        """The device as this part may see it: with the part's own random stream and what was sent to it."""
        return replace(self.device, part=part, got=self.got.get(part, {}))

    @cached_property
    def cost_key(self) -> tuple:
        """What the cost of a step depends on beside the batch size: the masks, and the shapes of what was sent."""
        return make_mask_key(self.job.plan), tree.outline_tree(self.context.got) if any(
            self.context.got.values()
        ) else ()

    def context_at_step(self, step: int, draws: dict[str, dict[str, Tensor]]) -> StepContext:
        """The context of one local step, with its number, its epoch and what parts drew for it."""
        if self.device.net.place.type != "cpu":
            draws = tree.map_tensors(lambda t: t.to(self.device.net.place), draws)
        numbers = self._placed_numbers | {
            "step": self._step_numbers[step],
            "epoch": self._step_numbers[step // self.rows.per_epoch],
        }
        return self.context._replace(numbers=numbers, draws=draws)

    @cached_property
    def _placed_numbers(self) -> dict[str, Tensor]:
        """lr, steps and size, on the compute device of the model."""
        return {k: v.to(self.device.net.place) for k, v in self.context.numbers.items()}

    @cached_property
    def _step_numbers(self) -> tuple[Tensor, ...]:
        """0, 1, 2, ... as tensors of no dimension, so that steps need not make them."""
        net = self.device.net
        return torch.arange(len(self.rows), dtype=net.dtype, device=net.place).unbind()


def prepare_training(setup: TrainingSetup, job: Job, memory: dict[str, Tree]) -> LocalTraining:
    """decode -> data -> begin: what the device trains from, on which batches, with which states of parts."""
    net, method = setup.net, setup.method
    anchor, covered, got = receive_model(setup, job, memory)
    numbers = {"lr": make_scalar(job.work.lr, net.dtype)}
    device = Device(
        job.device,
        job.round,
        setup.samples(job.device),
        net,
        numbers,
        anchor,
        covered,
        {},
        job.plan,
        setup.streams,
        "",
        told={} if TOLD in got else None,
    )
    macs = 0
    for part in method.parts_at("data"):
        view = replace(device, part=part.name(), got=got.get(part.name(), {}), shared=setup.samples(SERVER) or None)
        part_memory = memory[part.name()] if part.name() in memory else part.init_device(anchor)
        device = replace(device, samples=part.data(device.samples, part_memory, view))
    rows = make_schedule(
        device.samples.index,
        job.work,
        setup.streams.make_torch_generator("batches", job.round, job.device),
        net.mixes_batch,
    )
    for key, value in (("steps", len(rows)), ("size", len(device.samples))):
        numbers[key] = make_scalar(value, net.dtype)
    if setup.optimiser.schedule:
        numbers["lr_sum"] = make_scalar(job.work.lr * setup.optimiser.schedule.sum_factors(len(rows)), net.dtype)

    params, states, memory = anchor, {}, dict(memory)
    for part in method.parts:
        name, results, is_first = part.name(), [(params, {})], part.name() not in memory
        if is_first:
            memory[name] = part.init_device(anchor)
        if part.acts_at("begin"):
            view = replace(device, part=name, got=got.get(name, {}))
            sizes = len(device.samples), len(rows)
            key = (name, "begin", is_first, *sizes, make_mask_key(job.plan), frozenset(view.got))
            macs += setup.tally.run_and_count(key, lambda: results.append(part.begin(params, memory[name], view)))
        params, states[name] = results[-1]
    mask = make_training_mask(net, job.plan, anchor)
    context = StepContext(
        anchor, {part: drop_requests(got[part]) for part in method.stepping_parts if part in got}, numbers, {}, mask
    )
    slots = memory.get(SLOTS_KEY) if method.keeps_slots else None
    return LocalTraining(job, device, memory, setup.rule.init_state(params, states, slots), context, rows, got, macs)


def receive_model(setup: TrainingSetup, job: Job, memory: dict[str, Tree]) -> tuple[Params, dict[str, Tensor], dict]:
    """What arrived: parameters at full shape, which elements (where not all), and, by part, what came beside."""
    net = setup.net
    like, codecs = net.initial, setup.method.codecs_for("down")
    message = (
        wire.decode_message(job.message, codecs, make_device_link(setup, job, "down"), memory)
        if codecs
        else job.message
    )
    values, covered, got = wire.unpack_message(message, like, job.plan, net.slicer)
    personal = memory.get(PERSONAL_KEY, {})
    anchor = {}
    for name, value in like.items():
        if name in values:
            anchor[name] = values[name]
        elif net.roles.get(name) == "personal":
            anchor[name] = personal.get(name, value)
        else:
            anchor[name] = torch.zeros_like(value)
            covered[name] = torch.zeros_like(value, dtype=torch.bool)
    return anchor, covered, got


def drop_requests(got: dict) -> dict:
    """What was sent to a part without its requests (boolean scalars).

    Requests are for `begin`, `end` and `measure`; steps do not see them, so that they stay the same for all devices.
    """
    return {k: v for k, v in got.items() if not (isinstance(v, Tensor) and v.dtype == torch.bool and v.dim() == 0)}


@lru_cache(4096)
def make_scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor. It is cached and shared between devices: nobody may write to it."""
    return torch.tensor(value, dtype=dtype)


def make_training_mask(net: Net, plan: Plan, like: Params) -> Params:
    """By tensor, 1 where the plan trains and 0 elsewhere; tensors that are trained whole have no entry."""
    if not plan:
        return {}
    masks = {k: net.slicer.covered_mask(k, like[k], plan) for k in net.trainable}
    return {k: m.to(like[k].dtype) for k, m in masks.items() if m is not None}


def make_device_link(setup: TrainingSetup, job: Job, direction: str) -> CodecLink:
    """The device's end of the link to the server, for codecs of this direction ("up" or "down")."""
    net, where = setup.net, (job.device, job.round, job.plan)
    trained = frozenset(net.trainable)
    return CodecLink(direction, *where, net.slicer, setup.streams, net.initial, trained, blocks=net.names_by_block)
