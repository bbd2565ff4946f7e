"""What happens on a device around its training: decode, data, begin ... end, measure, encode."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from torch import Tensor

from shoal.core import wire
from shoal.core.compose import Method
from shoal.core.local.schedule import Schedule, schedule
from shoal.core.local.step import Course, Rule, Scene
from shoal.core.model import tree
from shoal.core.model.flops import Tally, masked
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.streams import Streams
from shoal.core.types import SERVER, Device, Job, Optimiser, Outcome, Samples
from shoal.core.wire import Link

PERSONAL = ".personal"
"""Where a device keeps its personal tensors; no part can have that name."""


class Augment(Protocol):
    """Changes images by chance: what is drawn for each, how many tensors that is, and what is done with it."""

    @property
    def count(self) -> int: ...

    def draw(self, generator: torch.Generator, images: int, /) -> list[Tensor]: ...

    def turned(self, x: Tensor, drawn: list[Tensor], /) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Site:
    """All that devices of a run have in common and that does not change from round to round."""

    method: Method
    net: Net
    streams: Streams
    optimiser: Optimiser
    samples: Callable[[int], Samples]
    """A device's own samples; the server's for the pseudo-device."""
    augment: Augment | None = None
    tally: Tally = field(default_factory=Tally)
    kind: str = ""
    """Sites of the same kind have the same model, apart from its numbers; without a name, no other site has."""

    @property
    def rule(self) -> Rule:
        return Rule(self.net, self.method, self.optimiser)

    def enrol(self, device: int) -> dict[str, Tensor]:
        """What a device tells about itself at first contact."""
        card: dict[str, Tensor] = {}
        for part in self.method.at("enrol"):
            card = part.enrol(card, self.samples(device), self.net)
        return card


@dataclass(frozen=True, eq=False)
class Visit:
    """One device in one round, ready to train."""

    job: Job
    device: Device
    memory: dict[str, Tree]
    course: Course
    scene: Scene
    rows: Schedule
    got: dict[str, dict]
    """By part, what came beside the model; of it, steps see all but the requests."""
    macs: int
    """Multiply-accumulates of what ran before training."""

    def at(self, part: str) -> Device:
        return replace(self.device, part=part, got=self.got.get(part, {}))

    @cached_property
    def form(self) -> tuple:
        """What the cost of a step depends on, beside the number of samples: the masks, and what came with the model."""
        return masked(self.job.plan), tree.outline(self.scene.got) if any(self.scene.got.values()) else ()

    def scene_at(self, step: int, draws: dict[str, dict[str, Tensor]]) -> Scene:
        """What surrounds one step of this visit."""
        if self.device.net.place.type != "cpu":
            draws = tree.map(lambda t: t.to(self.device.net.place), draws)
        numbers = self._numbers | {"step": self._steps[step], "epoch": self._steps[step // self.rows.per_epoch]}
        return self.scene._replace(numbers=numbers, draws=draws)

    @cached_property
    def _numbers(self) -> dict[str, Tensor]:
        """The visit's numbers where the model is."""
        return {k: v.to(self.device.net.place) for k, v in self.scene.numbers.items()}

    @cached_property
    def _steps(self) -> tuple[Tensor, ...]:
        """0, 1, 2, ... as tensors."""
        net = self.device.net
        return torch.arange(len(self.rows), dtype=net.dtype, device=net.place).unbind()


def prepare(site: Site, job: Job, memory: dict[str, Tree]) -> Visit:
    """decode -> data -> begin."""
    net, method = site.net, site.method
    anchor, covered, got = receive(site, job, memory)
    numbers = {"lr": scalar(job.work.lr, net.dtype)}
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
    for part in method.at("data"):
        own = replace(device, part=part.name(), got=got.get(part.name(), {}), shared=site.samples(SERVER) or None)
        known = memory[part.name()] if part.name() in memory else part.init_device(anchor)
        device = replace(device, samples=part.data(device.samples, known, own))
    rows = schedule(
        device.samples.index, job.work, site.streams.torch("batches", job.round, job.device), net.mixes_batch
    )
    for key, value in (("steps", len(rows)), ("size", len(device.samples))):
        numbers[key] = scalar(value, net.dtype)

    params, states, memory = anchor, {}, dict(memory)
    for part in method.parts:
        name, made, first = part.name(), [(params, {})], part.name() not in memory
        if first:
            memory[name] = part.init_device(anchor)
        if part.acts_at("begin"):
            own = replace(device, part=name, got=got.get(name, {}))
            key = (name, "begin", first, len(device.samples), len(rows), masked(job.plan), frozenset(own.got))
            macs += site.tally.of(key, lambda: made.append(part.begin(params, memory[name], own)))
        params, states[name] = made[-1]
    mask = trained_mask(net, job.plan, anchor)
    scene = Scene(anchor, {part: unasked(got[part]) for part in method.stepping if part in got}, numbers, {}, mask)
    return Visit(job, device, memory, site.rule.start(params, states), scene, rows, got, macs)


@dataclass(frozen=True, eq=False)
class Ending:
    """A device after its last step, before anything is encoded."""

    body: Params
    beside: dict[str, dict]
    memory: dict[str, Tree]
    macs: int
    """Multiply-accumulates of what ran before and after training."""


def finish(site: Site, visit: Visit, course: Course, loss: float, macs_train: int) -> tuple[Outcome, dict[str, Tree]]:
    """end -> measure -> encode; the outcome, and the device's memory after it (the old one if all was in vain)."""
    ending = end(site, visit, course)
    return answer(site, visit, ending, tree.finite([ending.body, ending.beside]), loss, macs_train)


def end(site: Site, visit: Visit, course: Course) -> Ending:
    """end -> measure."""
    net, method, job = site.net, site.method, visit.job
    trained = course.params | course.buffers
    params, memory, macs = {k: trained[k] for k in visit.scene.anchor}, dict(visit.memory), visit.macs
    beside: dict[str, dict] = {}
    for part in method.parts:
        name, own = part.name(), visit.at(part.name())
        state, made = course.states.get(name, {}), []
        key = (name, "end", len(own.samples), len(visit.rows), masked(job.plan), frozenset(own.got))
        if part.acts_at("end"):
            macs += site.tally.of(key, lambda: made.append(part.end(params, state, memory[name], own)))
            params, memory[name] = made[-1]
        if part.acts_at("measure"):
            macs += site.tally.of((*key, "measure"), lambda: made.append(part.measure(params, state, own)))
            if made[-1]:
                beside[name] = made[-1]
    personal = net.named("personal")
    if personal:
        memory[PERSONAL] = {k: params[k] for k in personal}

    shared = net.named("shared")
    body = params if method.carries == "values" else tree.minus({k: params[k] for k in shared}, visit.scene.anchor)
    return Ending(body, beside, memory, macs)


def answer(
    site: Site, visit: Visit, ending: Ending, finite: bool, loss: float, macs_train: int
) -> tuple[Outcome, dict[str, Tree]]:
    """encode, where there is anything worth sending."""
    net, method, job = site.net, site.method, visit.job
    forward = site.tally.forward(net, job.plan)
    message, problem, memory = None, "its update is not finite", visit.memory
    if finite:
        message, problem = wire.pack_message(ending.body, ending.beside, job.plan, net.slicer, net.named("shared")), ""
        codecs, memory = method.codecs("up"), ending.memory
        if codecs:
            message, memory = wire.encode(message, codecs, memory, link_of(site, job, "up"))
    outcome = Outcome(
        job.device,
        message,
        problem,
        steps=len(visit.rows),
        samples=sum(visit.rows.sizes),
        loss=loss,
        macs_forward=forward,
        macs_work=round((ending.macs + macs_train) * forward / max(net.macs_forward, 1)),
        finite=finite,
    )
    return outcome, memory


def receive(site: Site, job: Job, memory: dict[str, Tree]) -> tuple[Params, dict[str, Tensor], dict]:
    """The parameters as they arrived at full shape, what of them arrived, and what lay beside."""
    net = site.net
    like, codecs = net.initial, site.method.codecs("down")
    message = wire.decode(job.message, codecs, link_of(site, job, "down"), memory) if codecs else job.message
    values, covered, got = wire.open_message(message, like, job.plan, net.slicer)
    own = memory.get(PERSONAL, {})
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


def unasked(got: dict) -> dict:
    """What a part's steps can use: a request is for `begin`, `end` and `measure`, and makes no step another one."""
    return {k: v for k, v in got.items() if not (isinstance(v, Tensor) and v.dtype == torch.bool and v.dim() == 0)}


@lru_cache(4096)
def scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor; nobody writes to it, so devices may share it."""
    return torch.tensor(value, dtype=dtype)


def trained_mask(net: Net, plan: Plan, like: Params) -> Params:
    """A mask for every tensor that a plan trains only in part."""
    if not plan:
        return {}
    masks = {k: net.slicer.covered(k, like[k], plan) for k in net.trainable}
    return {k: m.to(like[k].dtype) for k, m in masks.items() if m is not None}


def link_of(site: Site, job: Job, direction: str) -> Link:
    net, where = site.net, (job.device, job.round, job.plan)
    trained = frozenset(net.trainable)
    return Link(direction, *where, net.slicer, site.streams, net.initial, trained, blocks=net.by_block)
