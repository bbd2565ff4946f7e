"""A look at a part before it is trusted: a tiny run of two rounds, and its steps in one vectorised call."""

from collections.abc import Mapping
from dataclasses import replace
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
from shoal.core.part import Part
from shoal.core.plan import WHOLE, Axis, Block, Cut
from shoal.core.round import Loop
from shoal.core.standing import Register, Standing
from shoal.core.streams import Streams
from shoal.core.train import Course, Rule, Scene, advance, functional, gated
from shoal.core.types import SERVER, Batch, Optimiser, Samples, Work
from shoal.engines.crew import Crew
from shoal.engines.machine import Machine
from shoal.engines.serial import Serial
from shoal.fleet.fleets import Uniform
from shoal.memory import Memory
from shoal.watch import refused, watched


def probe(part: Part) -> None:
    """Play two rounds with a watched copy of the part, then put its steps through one `vmap` call."""
    loop, net = tiny_run(Method((watched(part),)))
    assert isinstance(loop.engine, Machine)
    standing, memory = loop.start(net), loop.engine.memory
    for number in range(2):
        before = standing
        standing, row = loop.play(before, number)
        memory.commit(number, kept=not row.get("void"))
        loop.settle(before, standing)
    try:
        tree.pack([standing.states, *memory.held.values()])
    except TypeError as error:
        raise refused(part, "a state or memory", f"keeps what cannot be stored: {error}", "Keep trees.") from error
    together(part)


def tiny_run(
    method: Method,
    sizes: tuple[int, ...] = (5, 3),
    momentum: float = 0.0,
    memory: Path | None = None,
    crew: Crew | None = None,
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
        Machine(site, Memory(memory), crew or Serial()),
        Uniform(),
        streams,
        np.array(sizes),
        len(sizes),
        lambda round, device: Work(1.0, 0, 2, 0.1),
        Judge(samples(SERVER), 2),
        lambda row: True,
        Optimiser(momentum),
        server=samples(SERVER),
    )
    return loop, net


def tiny_net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = nn.Sequential()
        module.add_module("a", nn.Linear(4, 3))
        module.add_module("relu", nn.ReLU())
        module.add_module("b", nn.Linear(3, 2))
    axes = (Axis("a", 3, (Cut("a.weight", 0), Cut("a.bias", 0), Cut("b.weight", 1, reads=True))),)
    return Net(module.double(), (4,), 2, axes, (Block("a", ("a", "relu")), Block("b", ("b",))))


def visits_of(loop: Loop, standing: Standing, number: int = 0) -> list[Visit]:
    """Every device of a loop as it stands before its first step of a round."""
    assert isinstance(loop.engine, Machine)
    site, method, devices = loop.engine.site, loop.method, list(range(len(loop.sizes)))
    round = replace(loop.opening(standing, number, Register({}, loop.engine.enrol)), devices=devices)
    plans, states = method.plan({d: WHOLE for d in devices}, standing.states, round)
    round = replace(round, plans=plans)
    beside, states = method.send(states, round)
    jobs, _ = loop.post.jobs(round, beside, states)
    memory = loop.engine.memory
    return [prepare(site, job, memory.get(job.device)) for job in jobs]


def scenes_of(method: Method, visit: Visit) -> list[Scene]:
    """What surrounds each step of a visit, with the draws that the engine `serial` would make."""
    own = {part.name(): visit.at(part.name()) for part in method.at("draw")}
    generators = {name: device.generator("draw") for name, device in own.items()}

    def drawn(step: int) -> dict[str, dict[str, Tensor]]:
        return {p.name(): p.draw(generators[p.name()], own[p.name()], step) for p in method.at("draw")}

    return [visit.scene_at(step, drawn(step)) for step in range(len(visit.rows))]


def together(part: Part) -> None:
    """One step of two devices in one vectorised call: what branches on data or numbers fails here."""
    loop, net = tiny_run(Method((part,)), sizes=(4, 4))
    visits = visits_of(loop, loop.start(net))
    method = loop.method
    scenes = [scenes_of(method, v)[0] for v in visits]
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
