"""One tiny part for each point that no shipped part uses yet; they keep the laws like any other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.core.batch import Batch, BatchScore, GradientFunction, Samples, Scorer
from shoal.core.extras import Declaration, Extra
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Local, Reply, Round
from shoal.core.wire import REQUEST, CodecLink, Message, pack_bits, unpack_bits


@dataclass(frozen=True)
class ExtraLayer(Part):
    """model: a scale on the logits, which each device keeps to itself."""

    def model(self, net: Net) -> Net:
        module = nn.Sequential()
        module.add_module("inner", copy_module(net))
        module.add_module("scale", Scale(net.classes))
        inner = lambda axes: tuple(  # noqa: E731
            replace(a, cuts=tuple(replace(c, tensor=f"inner.{c.tensor}") for c in a.cuts)) for a in axes
        )
        *first, last = [replace(b, children=tuple(f"inner.{child}" for child in b.children)) for b in net.blocks]
        return replace(
            net,
            module=module.to(net.dtype),
            axes=inner(net.axes),
            rows=inner(net.rows),
            blocks=(*first, replace(last, children=(*last.children, "scale"))),
            roles={f"inner.{k}": role for k, role in net.roles.items()} | {"scale.by": "personal"},
            head=f"inner.{net.head}" if net.head else "",
        )


class Scale(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.by = nn.Parameter(torch.ones(classes))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@dataclass(frozen=True)
class FrozenHead(Part):
    """model: the last layer is the server's; it is sent and never combined."""

    def model(self, net: Net) -> Net:
        last = [k for k in net.initial if net.roles.get(k, "shared") == "shared"][-2:]
        return replace(net, roles=dict(net.roles) | {k: "server" for k in last})


@dataclass(frozen=True)
class Histogram(Part):
    """enrol: devices tell their label counts once; weigh: a device counts by its number of classes."""

    reads: ClassVar = frozenset({"cards"})

    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        labels = samples.targets[samples.index]
        return card | {"labels": torch.bincount(labels, minlength=net.classes).int()}

    def declare_card(self, net: Net) -> Declaration:
        return {"labels": Extra("classes", "int", low=0)}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        classes = [int((round.roster[r.device]["labels"] > 0).sum()) if r.device >= 0 else 1 for r in round.replies]
        return weights * torch.tensor(classes, dtype=weights.dtype), state


@dataclass(frozen=True)
class HalfWidth(Part):
    """plan: every device trains one unit less of every axis, another one in every round."""

    sets: ClassVar = frozenset({"plan"})

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        def kept(device: int) -> dict[str, Tensor]:
            drop = {a.name: (device + round.number) % a.size for a in round.net.axes}
            return {a.name: torch.tensor([u for u in range(a.size) if u != drop[a.name]]) for a in round.net.axes}

        return {d: replace(p, kept=kept(d)) for d, p in plans.items()}, state


@dataclass(frozen=True)
class Sparse(Part):
    """plan: every other element of the first tensor is not trained at all."""

    sets: ClassVar = frozenset({"plan"})

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        name, value = next(iter(round.anchor.items()))
        mask = (torch.arange(value.numel()) % 2 == 0).view(value.shape)
        return {d: replace(p, masks={name: mask}) for d, p in plans.items()}, state


@dataclass(frozen=True)
class LastTensors(Part):
    """plan: only the last two tensors are sent; begin: the rest comes from memory; replies carry values."""

    carries: ClassVar = "values"

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        some = frozenset(list(round.anchor)[-2:]) if round.number else None
        return {d: replace(p, sent=some) for d, p in plans.items()}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        saved = memory.get("saved") or device.net.initial
        return {
            k: torch.where(device.covered[k], v, saved[k]) if k in device.covered else v for k, v in params.items()
        }, {}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"saved": params}


@dataclass(frozen=True)
class AskLoss(Part):
    """send: a request in every other round; measure: the loss on the device's data, only when asked."""

    reads: ClassVar = frozenset({"extras"})

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        asked = {"loss": REQUEST} if round.number % 2 == 0 else {}
        return {d: dict(asked) for d in round.devices}, state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        if not device.has_request("loss"):
            return {}
        batch = device.samples.take_all()
        logits = device.net.forward(params, batch.inputs)[0]
        return {"loss": nn.functional.cross_entropy(logits, batch.targets[0][0]).detach().float()}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"loss": Extra(low=0, when="loss")}

    def init_server(self, round: Round) -> Tree:
        return {"losses": []}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        told = [r.report[self.name()]["loss"] for r in round.replies if self.name() in r.report]
        return params, {"losses": [*state["losses"], *told]}


@dataclass(frozen=True)
class Twice(Part):
    """data: every sample counts twice."""

    def data(self, samples: Samples, memory: Tree, device: Device) -> Samples:
        return samples.join(samples)


@dataclass(frozen=True)
class Noise(Part):
    """draw and objective: the parameters are shaken before the loss is taken."""

    neutral: ClassVar = Neutral({"size": 0.0})

    size: float = 0.01

    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        like = device.anchor
        return {k: torch.randn(like[k].shape, generator=generator, dtype=like[k].dtype) for k in device.net.trainable}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        return lambda params, batch: inner({k: p + self.size * local.draws[k] for k, p in params.items()}, batch)


@dataclass(frozen=True)
class OwnLoss(Part):
    """objective: another loss altogether (the squared distance of the logits from the one-hot target)."""

    replaces_loss: ClassVar = True

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def squared(params: Params, batch) -> BatchScore:
            scored = inner(params, batch)
            classes = torch.arange(scored.logits.shape[-1])
            hot = (batch.targets[0][0][:, None] == classes).to(scored.logits.dtype)
            return scored._replace(loss=batch.mean((scored.logits - hot).square().sum(-1)))

        return squared


@dataclass(frozen=True)
class KeepMask(Part):
    """step: a mask in the part's state that keeps the first tensor from moving."""

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        first = device.net.trainable[0]
        return params, {
            "mask": {first: torch.zeros_like(params[first])},
            "seen": torch.zeros((), dtype=params[first].dtype),
        }

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        return update, state | {"seen": state["seen"] + scored.loss}


@dataclass(frozen=True)
class DropRows(Part):
    """A codec of the stage `rows`, both ways: the first row of every matrix is left out and not covered."""

    stage: ClassVar = "rows"
    directions: ClassVar = frozenset({"up", "down"})
    codes_delta: ClassVar = False

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        body = dict(message.body)
        for name in self.coded(link.shapes):
            kept = torch.ones(link.shapes[name][0], dtype=torch.bool)
            kept[0] = False
            body[name] = body[name] | {"value": body[name]["value"][1:], "rows": pack_bits(kept)}
        return replace(message, body=body), {"sent": memory.get("sent", 0) + 1}

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        def fewer(name: str) -> torch.Size:
            kept = unpack_bits(message.body[name]["rows"], shapes[name][:1]).sum()
            return torch.Size([int(kept), *shapes[name][1:]])

        return shapes | {name: fewer(name) for name in self.coded(shapes)}

    def decode(self, message: Message, link: CodecLink) -> Message:
        body = dict(message.body)
        for name in self.coded(link.shapes):
            kept = unpack_bits(body[name]["rows"], link.shapes[name][:1])
            full = torch.zeros(link.shapes[name], dtype=body[name]["value"].dtype)
            full[kept] = body[name]["value"]
            covered = kept.view(-1, *[1] * (full.dim() - 1)).expand(full.shape)
            body[name] = {"value": full, "covered": covered}
        return replace(message, body=body)

    @staticmethod
    def coded(shapes: Mapping[str, torch.Size]) -> list[str]:
        return [name for name, shape in shapes.items() if len(shape) > 1 and shape[0] > 1]


@dataclass(frozen=True)
class Largest(Part):
    """A codec of the stage `sparsify`: the larger half of each tensor travels, the rest is owed to the next round."""

    stage: ClassVar = "sparsify"

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        names = list(message.body)
        owed = memory.get("owed") or {k: torch.zeros_like(link.like[k]) for k in names}
        values = {k: message.body[k]["value"] + v for k, v in link.reduce_from_full(owed).items()}
        at = {k: v.flatten().abs().topk((v.numel() + 1) // 2).indices.sort().values for k, v in values.items()}
        rest = {k: v.flatten().index_fill(0, at[k], 0).view(v.shape) for k, v in values.items()}
        seen, left = link.expand_to_full({k: torch.ones_like(v) for k, v in values.items()}), link.expand_to_full(rest)
        body = {k: message.body[k] | {"value": v.flatten()[at[k]], "at": at[k].int()} for k, v in values.items()}
        return replace(message, body=body), {"owed": {k: torch.where(seen[k] > 0, left[k], owed[k]) for k in names}}

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        return {name: torch.Size([(shape.numel() + 1) // 2]) for name, shape in shapes.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        body = {}
        for name, entry in message.body.items():
            flat = torch.zeros(link.shapes[name].numel(), dtype=entry["value"].dtype)
            rest = {k: v for k, v in entry.items() if k not in ("value", "at")}
            body[name] = rest | {
                "value": flat.index_copy(0, entry["at"].long(), entry["value"]).view(link.shapes[name])
            }
        return replace(message, body=body)

    def error(self, value: Tensor) -> Tensor:
        return value.abs()


@dataclass(frozen=True)
class Half(Part):
    """A codec of the stage `quantise`, both ways: numbers travel as 32 bits instead of 64."""

    stage: ClassVar = "quantise"
    directions: ClassVar = frozenset({"up", "down"})
    codes_delta: ClassVar = False

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        return message.with_values(**{k: e["value"].float() for k, e in message.body.items()}), memory

    def decode(self, message: Message, link: CodecLink) -> Message:
        return message.with_values(**{k: e["value"].double() for k, e in message.body.items()})

    def error(self, value: Tensor) -> Tensor:
        return value.abs() * 2**-24


@dataclass(frozen=True)
class ServerJoins(Part):
    """select: the server takes part as a pseudo-device; weigh: it counts by its samples."""

    reads: ClassVar = frozenset({"sizes"})

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        return [*devices, *({SERVER} - set(devices))], state

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        own = [r.size if r.device == SERVER else 0 for r in round.replies]
        return weights + torch.tensor(own, dtype=weights.dtype), state


@dataclass(frozen=True)
class CutOnce(Part):
    """prune: after the first round the last unit of every axis is gone for good."""

    at: int = 0

    def init_server(self, round: Round) -> Tree:
        return {"like": dict(round.anchor), "units": {a.name: torch.arange(a.size) for a in round.net.axes}}

    def prune(self, plan: Plan, state: Tree, round: Round) -> tuple[Plan, Tree]:
        if round.number != self.at:
            return plan, state
        return Plan({a.name: torch.arange(a.size - 1) for a in round.net.axes}), state


@dataclass(frozen=True)
class Remember(Part):
    """begin and end: a device remembers the model it returned (a memory shaped like the parameters)."""

    neutral: ClassVar = Neutral({})

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"last": params, "visits": memory.get("visits", 0) + 1}


@dataclass(frozen=True)
class Smoothed(Part):
    """evaluate: the mean of the last two models is judged, and beside it the newest one."""

    def init_server(self, round: Round) -> Tree:
        return {"before": round.anchor}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        return params, {"before": round.anchor}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        newest = judged[""]
        return judged | {"": {k: (v + state["before"][k]) / 2 for k, v in newest.items()}, "newest": newest}


@dataclass(frozen=True)
class Ahead(Part):
    """gradient: it is taken where one step would lead; step: the state counts the steps by what `gradient` hands on."""

    perturbs_gradient: ClassVar = True
    neutral: ClassVar = Neutral({"length": 0.0})
    length: float = 0.1

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"norm": next(iter(params.values())).new_zeros(())}

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        def compute_gradient_ahead(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            here, scored = inner(scorer, params, batch)
            there, _ = inner(scorer, {k: p - self.length * here[k] for k, p in params.items()}, batch)
            norm = torch.stack([g.square().sum() for g in here.values()]).sum()
            return there, scored._replace(aux=scored.aux | {"ahead": norm})

        return compute_gradient_ahead

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        return update, {"norm": state["norm"] + scored.aux["ahead"]}


@dataclass(frozen=True)
class Sieve(Part):
    """sift: the reply with the largest update is left out, and the others are halved; the state counts rounds."""

    reads: ClassVar = frozenset({"updates"})

    def init_server(self, round: Round) -> Tree:
        return {"rounds": 0}

    def sift(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Sequence[Reply], Tree]:
        norm = {r.device: sum(float(d.square().sum()) for d in r.delta.values()) for r in replies}
        kept = [r for r in replies if norm[r.device] < max(norm.values())] or replies
        halved = [replace(r, delta={k: d / 2 for k, d in r.delta.items()}) for r in kept]
        return halved, {"rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class OwnModel(Part):
    """end: a device remembers what it trained; personal: its own model lies half-way to the shared one."""

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"trained": params}

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        trained = memory.get("trained") or params
        return {k: (v + trained[k]) / 2 for k, v in params.items()}


@dataclass(frozen=True)
class MeanOfAll(Part):
    """observe: the sum of all models so far; evaluate: their mean is judged."""

    def init_server(self, round: Round) -> Tree:
        return {"sum": {k: torch.zeros_like(v) for k, v in round.anchor.items()}, "rounds": 0}

    def observe(self, judged: Params, state: Tree, round: Round) -> Tree:
        return {"sum": {k: v + judged[k] for k, v in state["sum"].items()}, "rounds": state["rounds"] + 1}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        rounds = state["rounds"]
        return judged | {"": {k: v / rounds for k, v in state["sum"].items()}} if rounds else judged


TINY: list[Part] = [
    ExtraLayer(),
    FrozenHead(),
    Histogram(),
    HalfWidth(),
    Sparse(),
    LastTensors(),
    AskLoss(),
    Twice(),
    Noise(),
    OwnLoss(),
    KeepMask(),
    DropRows(),
    Largest(),
    Half(),
    ServerJoins(),
    CutOnce(),
    Remember(),
    Smoothed(),
    Ahead(),
    Sieve(),
    OwnModel(),
    MeanOfAll(),
]
