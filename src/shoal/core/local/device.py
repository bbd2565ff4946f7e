"""What happens on a device around its training: decode, data, begin ... end, measure, encode."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from shoal.core import wire
from shoal.core.compose import Method
from shoal.core.local.schedule import BatchSchedule, make_schedule
from shoal.core.local.step import LocalState, StepContext, StepRule
from shoal.core.model import tree
from shoal.core.model.flops import FlopCache, make_mask_key
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Device, Job, Optimiser, Samples
from shoal.core.wire import CodecLink

PERSONAL_KEY = ".personal"
"""Where a device keeps its personal tensors; no part can have that name."""


class Augmenter(Protocol):
    """Changes images by chance: what is drawn for each, how many tensors that is, and what is done with it."""

    @property
    def count(self) -> int: ...

    def draw(self, generator: torch.Generator, images: int, /) -> list[Tensor]: ...

    def transform_images(self, x: Tensor, drawn: list[Tensor], /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """All that devices of a run have in common and that does not change from round to round."""

    method: Method
    net: Net
    streams: RandomStreams
    optimiser: Optimiser
    samples: Callable[[int], Samples]
    """A device's own samples; the server's for the pseudo-device."""
    augment: Augmenter | None = None
    tally: FlopCache = field(default_factory=FlopCache)
    kind: str = ""
    """Sites of the same kind have the same model, apart from its numbers; without a name, no other site has."""

    @property
    def rule(self) -> StepRule:
        return StepRule(self.net, self.method, self.optimiser)

    def enrol(self, device: int) -> dict[str, Tensor]:
        """What a device tells about itself at first contact."""
        card: dict[str, Tensor] = {}
        for part in self.method.parts_at("enrol"):
            card = part.enrol(card, self.samples(device), self.net)
        return card


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """One device in one round, ready to train."""

    job: Job
    device: Device
    memory: dict[str, Tree]
    state: LocalState
    context: StepContext
    rows: BatchSchedule
    got: dict[str, dict]
    """By part, what came beside the model; of it, steps see all but the requests."""
    macs: int
    """Multiply-accumulates of what ran before training."""

    def device_for_part(self, part: str) -> Device:
        return replace(self.device, part=part, got=self.got.get(part, {}))

    @cached_property
    def cost_key(self) -> tuple:
        """What the cost of a step depends on, beside the number of samples: the masks, and what came with the model."""
        return make_mask_key(self.job.plan), tree.outline_tree(self.context.got) if any(
            self.context.got.values()
        ) else ()

    def context_at_step(self, step: int, draws: dict[str, dict[str, Tensor]]) -> StepContext:
        """What surrounds one step of this visit."""
        if self.device.net.place.type != "cpu":
            draws = tree.map_tensors(lambda t: t.to(self.device.net.place), draws)
        numbers = self._placed_numbers | {
            "step": self._step_numbers[step],
            "epoch": self._step_numbers[step // self.rows.per_epoch],
        }
        return self.context._replace(numbers=numbers, draws=draws)

    @cached_property
    def _placed_numbers(self) -> dict[str, Tensor]:
        """The visit's numbers where the model is."""
        return {k: v.to(self.device.net.place) for k, v in self.context.numbers.items()}

    @cached_property
    def _step_numbers(self) -> tuple[Tensor, ...]:
        """0, 1, 2, ... as tensors."""
        net = self.device.net
        return torch.arange(len(self.rows), dtype=net.dtype, device=net.place).unbind()


def prepare_training(site: TrainingSetup, job: Job, memory: dict[str, Tree]) -> LocalTraining:
    """decode -> data -> begin."""
    net, method = site.net, site.method
    anchor, covered, got = receive_model(site, job, memory)
    numbers = {"lr": make_scalar(job.work.lr, net.dtype)}
    device = Device(
        job.device,
        job.round,
        site.samples(job.device),
        net,
        numbers,
        anchor,
        covered,
        {},
        job.plan,
        site.streams,
        "",
    )
    macs = 0
    for part in method.parts_at("data"):
        own = replace(device, part=part.name(), got=got.get(part.name(), {}), shared=site.samples(SERVER) or None)
        known = memory[part.name()] if part.name() in memory else part.init_device(anchor)
        device = replace(device, samples=part.data(device.samples, known, own))
    rows = make_schedule(
        device.samples.index,
        job.work,
        site.streams.make_torch_generator("batches", job.round, job.device),
        net.mixes_batch,
    )
    for key, value in (("steps", len(rows)), ("size", len(device.samples))):
        numbers[key] = make_scalar(value, net.dtype)

    params, states, memory = anchor, {}, dict(memory)
    for part in method.parts:
        name, made, first = part.name(), [(params, {})], part.name() not in memory
        if first:
            memory[name] = part.init_device(anchor)
        if part.acts_at("begin"):
            own = replace(device, part=name, got=got.get(name, {}))
            key = (name, "begin", first, len(device.samples), len(rows), make_mask_key(job.plan), frozenset(own.got))
            macs += site.tally.run_and_count(key, lambda: made.append(part.begin(params, memory[name], own)))
        params, states[name] = made[-1]
    mask = make_training_mask(net, job.plan, anchor)
    scene = StepContext(
        anchor, {part: drop_requests(got[part]) for part in method.stepping_parts if part in got}, numbers, {}, mask
    )
    return LocalTraining(job, device, memory, site.rule.init_state(params, states), scene, rows, got, macs)


def receive_model(site: TrainingSetup, job: Job, memory: dict[str, Tree]) -> tuple[Params, dict[str, Tensor], dict]:
    """The parameters as they arrived at full shape, what of them arrived, and what lay beside."""
    net = site.net
    like, codecs = net.initial, site.method.codecs_for("down")
    message = (
        wire.decode_message(job.message, codecs, make_device_link(site, job, "down"), memory) if codecs else job.message
    )
    values, covered, got = wire.open_message(message, like, job.plan, net.slicer)
    own = memory.get(PERSONAL_KEY, {})
    anchor = {}
    for name, value in like.items():
        if name in values:
            anchor[name] = values[name]
        elif net.roles.get(name) == "personal":
            anchor[name] = own.get(name, value)
        else:
            anchor[name] = torch.zeros_like(value)
            covered[name] = torch.zeros_like(value, dtype=torch.bool)
    return anchor, covered, got


def drop_requests(got: dict) -> dict:
    """What a part's steps can use: a request is for `begin`, `end` and `measure`, and makes no step another one."""
    return {k: v for k, v in got.items() if not (isinstance(v, Tensor) and v.dtype == torch.bool and v.dim() == 0)}


@lru_cache(4096)
def make_scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor; nobody writes to it, so devices may share it."""
    return torch.tensor(value, dtype=dtype)


def make_training_mask(net: Net, plan: Plan, like: Params) -> Params:
    """A mask for every tensor that a plan trains only in part."""
    if not plan:
        return {}
    masks = {k: net.slicer.covered_mask(k, like[k], plan) for k in net.trainable}
    return {k: m.to(like[k].dtype) for k, m in masks.items() if m is not None}


def make_device_link(site: TrainingSetup, job: Job, direction: str) -> CodecLink:
    net, where = site.net, (job.device, job.round, job.plan)
    trained = frozenset(net.trainable)
    return CodecLink(direction, *where, net.slicer, site.streams, net.initial, trained, blocks=net.names_by_block)
