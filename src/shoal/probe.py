"""A look at a part before it is trusted: it is played on a tiny run, and what it breaks is told in one sentence."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core import tree
from shoal.core.compose import Method
from shoal.core.device import Site, Visit, prepare
from shoal.core.errors import ShoalError
from shoal.core.evaluate import Judge
from shoal.core.net import Net
from shoal.core.part import POINTS, Part
from shoal.core.plan import WHOLE, Axis, Block, Cut
from shoal.core.round import Loop, Register, Standing
from shoal.core.streams import Streams
from shoal.core.train import Course, Rule, Scene, advance, gated
from shoal.core.tree import Params
from shoal.core.types import SERVER, Batch, Optimiser, Samples, Scored, Scorer, Work
from shoal.core.wire import Message
from shoal.engines.serial import Serial
from shoal.fleet.profile import Uniform
from shoal.memory import Memory


def probe(part: Part) -> None:
    """Play two rounds with a watched copy of the part, then put its steps through one `vmap` call."""
    loop, net = tiny_run(Method((watched(part),)))
    standing = loop.start(net)
    for number in range(2):
        standing, _ = loop.play(standing, number)
    together(part)


def tiny_run(
    method: Method, sizes: tuple[int, ...] = (5, 3), momentum: float = 0.0, memory: Path | None = None
) -> tuple[Loop, Net]:
    """A whole run in miniature: a 4-3-2 perceptron in float64, a few devices and a server with a handful of samples."""
    streams, net = Streams(0), method.model(tiny_net())
    total = sum(sizes) + 4
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(total, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (total,), generator=generator)
    ends = np.cumsum((0, *sizes))

    def samples(device: int) -> Samples:
        index = torch.arange(ends[-1], total) if device == SERVER else torch.arange(ends[device], ends[device + 1])
        return Samples(x, y, index)

    site = Site(method, net, streams, Optimiser(momentum), samples)
    loop = Loop(
        method,
        Serial(site, Memory(memory)),
        Uniform(),
        streams,
        np.array(sizes),
        len(sizes),
        lambda round, device: Work(1.0, 0, 2, 0.1),
        Judge(samples(SERVER)),
        lambda number: True,
        Optimiser(momentum),
        samples(SERVER),
    )
    return loop, net


def tiny_net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = nn.Sequential()
        module.add_module("a", nn.Linear(4, 3))
        module.add_module("relu", nn.ReLU())
        module.add_module("b", nn.Linear(3, 2))
    axes = (Axis("a", 3, (Cut("a.weight", 0), Cut("a.bias", 0), Cut("b.weight", 1))),)
    return Net(module.double(), (4,), 2, axes, (Block("a", ("a", "relu")), Block("b", ("b",))))


def visits_of(loop: Loop, standing: Standing) -> list[Visit]:
    """Every device of a loop as it stands before its first step."""
    assert isinstance(loop.engine, Serial)
    site, method, devices = loop.engine.site, loop.method, list(range(len(loop.sizes)))
    round = replace(loop.opening(standing, 0, Register({}, site.enrol)), devices=devices)
    plans, states = method.plan({d: WHOLE for d in devices}, standing.states, round)
    round = replace(round, plans=plans)
    beside, states = method.send(states, round)
    jobs, _ = loop.encode(round, beside, states)
    return [prepare(site, job, {}) for job in jobs]


def together(part: Part) -> None:
    """One step of two devices in one vectorised call: what branches on data or numbers fails here."""
    loop, net = tiny_run(Method((part,)), sizes=(4, 4))
    visits = visits_of(loop, loop.start(net))
    method = loop.method
    drawn = [
        {p.name(): p.draw(v.at(p.name()).generator(), v.at(p.name()), 0) for p in method.at("draw")} for v in visits
    ]
    scenes = [v.scene_at(0, d) for v, d in zip(visits, drawn)]
    batches = [v.device.samples.batch(v.rows[0]) for v in visits]
    inputs = torch.stack([b.inputs for b in batches])
    targets = torch.stack([b.targets[0][0] for b in batches])
    rule = Rule(net, method, Optimiser())

    def one_step(course: Course, x: Tensor, y: Tensor, scene: Scene) -> Course:
        new, _ = advance(rule, course, Batch(x, ((y, None),)), scene, functional)
        return gated(x.new_ones((), dtype=torch.bool), new, course)

    try:
        torch.vmap(one_step)(stacked([v.course for v in visits]), inputs, targets, stacked(scenes))
    except ShoalError:
        raise
    except Exception as error:
        text = str(error).split("\n")[0]
        branch = "data-dependent control flow" in text or ".item()" in text
        why = "branches on the value of a tensor" if branch else f"cannot be vectorised ({text[:160]})"
        raise refused(part, "objective or step", why, "Use torch.where and other tensor operations instead.") from error


def functional(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, Scored]:
    """The gradient as torch.func sees it."""

    def loss(own: Params) -> tuple[Tensor, Scored]:
        scored = scorer(own, batch)
        return scored.loss, scored

    return torch.func.grad(loss, has_aux=True)(params)


def stacked(trees: list) -> Any:
    """Trees of the same shape as one tree with the devices as first dimension."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.stack(trees)
    if isinstance(first, Mapping):
        return {k: stacked([t[k] for t in trees]) for k in first}
    if isinstance(first, tuple):
        made = [stacked([t[i] for t in trees]) for i in range(len(first))]
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
    return first


def watched(part: Part) -> Part:
    """A copy of a part that is checked at every point: it must not raise, change what it is given, or bend shapes."""
    cls = type(part)

    def guard(point: str) -> Callable:
        def call(self, *args):
            before = [tree.map(Tensor.clone, contents(a)) for a in args]
            try:
                result = getattr(cls, point)(part, *args)
            except ShoalError:
                raise
            except Exception as error:
                why = f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                raise refused(part, point, why, "Correct it there.") from error
            for old, new in zip(before, args):
                if not tree.same(old, contents(new)):
                    raise refused(
                        part, point, "changes what it is given", "Return new values and leave the old ones alone."
                    )
            check_shape(part, point, args, result)
            return result

        return call

    watched_points = [p for p in POINTS if part.acts_at(p) and p not in ("objective", "decode")]
    body: dict[str, Any] = {point: guard(point) for point in watched_points}
    if part.acts_at("objective"):
        body["objective"] = lambda self, inner, local: scoring(part, part.objective(inner, local))
    body["name"] = classmethod(lambda _: cls.name())
    kind = type(cls.__name__, (cls,), body)
    return kind(**{f.name: getattr(part, f.name) for f in fields(part)})


def scoring(part: Part, scorer: Scorer) -> Scorer:
    def call(params: Params, batch: Batch) -> Scored:
        try:
            scored = scorer(params, batch)
        except Exception as error:
            why = f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            raise refused(part, "objective", why, "Correct it there.") from error
        if not isinstance(scored, Scored) or scored.loss.shape != ():
            found = (
                f"a loss of shape {tuple(scored.loss.shape)}" if isinstance(scored, Scored) else type(scored).__name__
            )
            raise refused(part, "objective", f"returns {found}", "Return a Scored whose loss is one number.")
        return scored

    return call


def check_shape(part: Part, point: str, args: tuple, result: Any) -> None:
    """What a point returns must have the form of what it was given."""
    if point in ("select", "plan", "weigh", "serve", "prune", "begin", "end", "step", "encode", "combine", "send"):
        if not isinstance(result, tuple) or len(result) != 2:
            raise refused(part, point, "does not return two values", "Return the value and the state.")
    like: Any = {"step": 0, "begin": 0, "end": 0, "serve": 0}.get(point)
    if like is not None:
        given, made = args[like], result[0]
        for name, value in given.items():
            if name not in made or made[name].shape != value.shape:
                found = tuple(made[name].shape) if name in made else "nothing"
                raise refused(
                    part,
                    point,
                    f"returns {found} for {name}, which has shape {tuple(value.shape)}",
                    "Keep every name and shape.",
                )
    if point == "step" and structure(args[1]) != structure(result[1]):
        raise refused(
            part, point, "returns a state of another form than it was given", "Make the whole state in `begin`."
        )


def structure(node: Any) -> Any:
    if isinstance(node, Tensor):
        return tuple(node.shape), node.dtype
    if isinstance(node, Mapping):
        return {k: structure(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [structure(v) for v in node]
    return type(node)


def contents(value: Any) -> Any:
    """The trees inside an argument of a point, for comparison."""
    if isinstance(value, (Tensor, Mapping, list, tuple)):
        return list(value) if hasattr(value, "_fields") else value
    if isinstance(value, Message):
        return {"body": value.body, "beside": value.beside}
    if is_dataclass(value):
        names = ("anchor", "got", "numbers", "covered", "plans", "devices", "weights")
        return {k: contents(getattr(value, k)) for k in names if hasattr(value, k)}
    return None


def refused(part: Part, point: str, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"The part {part.name()} breaks a rule at {point}: it {why}.", advice)
