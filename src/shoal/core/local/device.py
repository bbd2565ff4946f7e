"""A device before its first local step: decode what was sent, choose data, draw batches, `begin` of each part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shoal.core import wire
from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
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
    """Random changes of images.

    Every image takes so many random `words` of 32 bits in every step. `read_draws` makes of them `count` tensors with a
    row for each step and image, which `transform_images` takes step by step.
    """

    @property
    def count(self) -> int: ...

    @property
    def words(self) -> int: ...

    def read_draws(self, words: Tensor, sizes: Sequence[int], batch: int, /) -> list[Tensor]: ...

    def transform_images(self, x: Tensor, drawn: list[Tensor], /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """What a message brings to a device: parameters at full shape, which elements arrived, and what came beside."""

    anchor: Params
    covered: dict[str, Tensor]
    got: dict[str, dict]
    plain_states: dict[tuple[str, ...], LocalState] = field(default_factory=dict)
    """By the names of the parts, the state before the first step of devices where no part has changed anything."""
    contexts: dict[tuple[float, int, int], StepContext] = field(default_factory=dict)
    """By learning rate, steps and samples, what the steps of a device of the whole model read."""


class ReceivedMessages:
    """What was received, by message, as long as that exists: devices that were sent the same one share it."""

    def __init__(self):
        self.by_message: WeakKeyDictionary[wire.Message, ReceivedMessage] = WeakKeyDictionary()

    def __reduce__(self):
        return ReceivedMessages, ()  # other processes receive messages of their own


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
    received: ReceivedMessages = field(default_factory=ReceivedMessages, init=False)

    @cached_property
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
    received = receive_or_reuse(setup, job, memory)
    anchor, got, told = received.anchor, received.got, {} if TOLD in received.got else None

    def make_device(samples: Samples, numbers: dict[str, Tensor]) -> Device:
        where = (samples, net, numbers, anchor, received.covered, {}, job.plan, setup.streams, "")
        return Device(job.device, job.round, *where, told=told)

    samples = setup.samples(job.device)
    if parts := method.parts_at("data"):
        device = make_device(samples, {"lr": make_scalar(job.work.lr, net.dtype)})
        for part in parts:
            view = replace(device, part=part.name(), got=got.get(part.name(), {}), shared=setup.samples(SERVER) or None)
            part_memory = memory[part.name()] if part.name() in memory else part.init_device(anchor)
            device = replace(device, samples=part.data(device.samples, part_memory, view))
            if not len(device.samples):
                problem = f"{part.name()} leaves device {job.device} no samples to train on in round {job.round}."
                raise ShoalError("bad-part", problem, "Its `data` must return at least one sample.")
        samples = device.samples
    generator = setup.streams.make_torch_generator("batches", job.round, job.device)
    rows = make_schedule(samples.index, job.work, generator, net.mixes_batch)
    context = make_context(setup, job, received, len(rows), len(samples))
    device = make_device(samples, context.numbers)

    params, states, memory, macs = anchor, {}, dict(memory), 0
    for part in method.parts:
        name, results, is_first = part.name(), [(params, {})], part.name() not in memory
        if is_first:
            memory[name] = part.init_device(anchor)
        if part.acts_at("begin"):
            view = replace(device, part=name, got=got.get(name, {}))
            sizes = len(device.samples), len(rows)
            known = frozenset(memory[name]) if isinstance(memory[name], dict) else ()
            key = (name, "begin", is_first, known, *sizes, make_mask_key(job.plan), frozenset(view.got))
            macs += setup.tally.run_and_count(key, lambda: results.append(part.begin(params, memory[name], view)))
        params, states[name] = results[-1]
    slots = memory.get(SLOTS_KEY) if method.keeps_slots else None
    state = init_local_state(setup, received, params, states, slots)
    return LocalTraining(job, device, memory, state, context, rows, got, macs)


def make_context(setup: TrainingSetup, job: Job, received: ReceivedMessage, steps: int, size: int) -> StepContext:
    """What the local steps of a device read; devices that were sent the same whole model, and are alike, share it."""
    key, dtype = (job.work.lr, steps, size), setup.net.dtype
    if key in received.contexts and not job.plan:
        return received.contexts[key]
    numbers = {name: make_scalar(value, dtype) for name, value in zip(("lr", "steps", "size"), key)}
    if schedule := setup.optimiser.schedule:
        numbers["lr_sum"] = make_scalar(job.work.lr * schedule.sum_factors(steps), dtype)
    got, mask = received.got, make_training_mask(setup.net, job.plan, received.anchor)
    got_in_steps = {part: drop_requests(got[part]) for part in setup.method.stepping_parts if part in got}
    context = StepContext(received.anchor, got_in_steps, numbers, {}, mask)
    if not job.plan:
        received.contexts[key] = context
    return context


def init_local_state(
    setup: TrainingSetup, received: ReceivedMessage, params: Params, states: dict[str, Tree], slots: Tree | None
) -> LocalState:
    """The state before the first step; devices that were sent the same share it where no part has changed anything."""
    if params is not received.anchor or slots is not None or any(state != {} for state in states.values()):
        return setup.rule.init_state(params, states, slots)
    names = tuple(states)
    if names not in received.plain_states:
        received.plain_states[names] = setup.rule.init_state(params, states)
    return received.plain_states[names]


def receive_or_reuse(setup: TrainingSetup, job: Job, memory: dict[str, Tree]) -> ReceivedMessage:
    """What arrived; a message that went to several devices as it is, and is read without memories, is read once."""
    net = setup.net
    if job.plan or setup.method.codecs_for("down") or "personal" in net.roles.values():
        return ReceivedMessage(*receive_model(setup, job, memory))
    known = setup.received.by_message
    received = known.get(job.message)
    if received is None:
        received = known[job.message] = ReceivedMessage(*receive_model(setup, job, memory))
    return received


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
