"""The smoke test of a part: a tiny run of two rounds with checks at every point, and one vectorised step.

It uses the model and a few samples of the run that the part is for, so that whatever fits these is accepted.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.local.device import LocalTraining, TrainingSetup, prepare_training
from shoal.core.local.step import StepContext
from shoal.core.measures.evaluate import Evaluator
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, scale_pixels, take_rows
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Axis, Block, Cut
from shoal.core.optimiser import Optimiser
from shoal.core.part import Part
from shoal.core.return_checks import broken_rule_error
from shoal.core.round import Loop
from shoal.core.server_state import EnrolmentRegister, ServerState
from shoal.core.session import Session, play_round
from shoal.core.streams import RandomStreams
from shoal.core.task import Engine, Task
from shoal.core.types import SERVER, Work
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.stack import DeviceStack
from shoal.engines.batched.step import build_step
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.fleet.fleets import UniformFleet
from shoal.parts import find_shipped_parts
from shoal.plugins.guard import guard_part
from shoal.storage.memory import DeviceMemory


@dataclass(frozen=True, eq=False)
class SmokeSetup:
    """What a part is tried on: a net before any part has changed it, and samples that it can take."""

    net: Net
    inputs: Inputs
    targets: Tensor
    lr: float = 0.1
    sizes: tuple[int, int] = (5, 3)
    """How many samples the two devices have."""
    kind: str = ""
    """Runs of one kind share programs: they have the same model and parts, and these very samples."""

    def copy_net(self) -> Net:
        """The net with a copied module, since a part may change it in place."""
        return replace(self.net, module=copy_module(self.net))


def make_tiny_setup(samples: int = 12, *parts: Part) -> SmokeSetup:
    """A 4-3-2 perceptron in float64, and random samples; a model of texts where one of the parts needs positions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (samples,), generator=generator)
    if any(part.needs_positions for part in parts):
        texts = torch.randint(1, TINY_WORDS - 1, (samples, 4), generator=generator)
        return SmokeSetup(build_tiny_text_net(), texts, targets)
    return SmokeSetup(build_tiny_net(), x, targets)


def make_smoke_setup(net: Net, inputs: Inputs, targets: Tensor) -> SmokeSetup:
    """The net of a run and a few of its samples; fewer where the net is large."""
    sizes = (2, 2) if net.macs_forward > LARGE else (5, 3)
    rows = np.random.default_rng(0).permutation(len(targets))
    index = torch.from_numpy(np.resize(rows, sum(sizes) + SHARED)).to(targets.device)
    return SmokeSetup(net, scale_pixels(take_rows(inputs, index)), targets[index], lr=0.01, sizes=sizes)


LARGE = 10**7
"""Multiply-accumulates per sample above which a net is tried on as few samples as possible."""
SHARED = 4
"""Samples of the server in a tiny run."""


def smoke_test_part(part: Part, setting: SmokeSetup | None = None) -> None:
    """Play two rounds with a guarded copy of the part, then make one step of two devices by `vmap`."""
    setting = setting or make_tiny_setup(12, part)
    loop, net = build_tiny_run(Method((guard_part(part),)), setting.sizes, setting=setting)
    session = Session(loop, net)
    for number in range(2):
        play_round(session)
        if session.server_state:
            loop.host.make_personal_model(0, session.server_state.params, number)
        for guarded in loop.method.parts_at("finetune"):
            check_finetuning(guarded, guarded.finetune(loop.work(number, 0)))
    try:
        tree.pack_tree([session.server_state.states if session.server_state else {}, *loop.host.memory.held.values()])
    except TypeError as error:
        raise broken_rule_error(
            part, "a state or memory", f"keeps what cannot be stored: {error}", "Keep trees."
        ) from error
    refuse_unvectorisable(part, setting)


def check_finetuning(part: Part, work: Any) -> None:
    """Raise unless a part returned work that can be done."""
    if not isinstance(work, Work) or work.batch < 1 or work.lr < 0 or not (work.epochs > 0 or work.steps > 0):
        why = f"returns {work!r:.80}, which is no work"
        raise broken_rule_error(part, "finetune", why, "Return dataclasses.replace(work, epochs=1.0, steps=0).")


def build_tiny_run(
    method: Method,
    sizes: tuple[int, ...] = (5, 3),
    momentum: float = 0.0,
    memory: Path | None = None,
    engine: Engine | None = None,
    setting: SmokeSetup | None = None,
    optimiser: Optimiser | None = None,
) -> tuple[Loop[LocalDevices], Net]:
    """The loop and the net of a run in miniature: a few devices and a server with a few samples each.

    `optimiser` is plain SGD with `momentum` unless it is given. Parts that others of the method need come first.
    """
    method = add_needed_parts(method)
    optimiser = optimiser or Optimiser(momentum)
    total = sum(sizes) + SHARED
    setting = setting or make_tiny_setup(total, *method.parts)
    streams, net = RandomStreams(0), method.model(setting.copy_net())
    ends = np.cumsum((0, *sizes))

    def get_samples(device: int) -> Samples:
        index = torch.arange(ends[-1], total) if device == SERVER else torch.arange(ends[device], ends[device + 1])
        return Samples(setting.inputs, setting.targets, index)

    training_setup = TrainingSetup(method, net, streams, optimiser, get_samples, kind=setting.kind)
    loop = Loop(
        method,
        LocalDevices(training_setup, DeviceMemory(memory, place=net.place), engine or SerialEngine()),
        UniformFleet(),
        streams,
        np.array(sizes),
        len(sizes),
        lambda round, device: Work(1.0, 0, 2, setting.lr),
        Evaluator(get_samples(SERVER), net.classes if net.task.has_class_logits else 2),
        lambda row: True,
        optimiser,
        server=get_samples(SERVER),
    )
    return loop, net


def add_needed_parts(method: Method) -> Method:
    """The method with the parts, at their defaults, that others of its parts need and that it does not list."""
    known, needed = find_shipped_parts(), dict.fromkeys(part.needs_part for part in method.parts if part.needs_part)
    return Method((*(known[name]() for name in needed if name not in method.names), *method.parts))


def build_tiny_net(outputs: int = 2) -> Net:
    """A perceptron of 4 inputs, 3 hidden units and so many outputs, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = nn.Sequential()
        module.add_module("a", nn.Linear(4, 3))
        module.add_module("relu", nn.ReLU())
        module.add_module("b", nn.Linear(3, outputs))
    axes = (Axis("a", 3, (Cut("a.weight", 0), Cut("a.bias", 0), Cut("b.weight", 1, reads=True))),)
    return Net(module.double(), (4,), outputs, axes, (Block("a", ("a", "relu")), Block("b", ("b",))))


TINY_WORDS = 7
"""How many words the tiny model of texts knows."""


class TinyAttention(nn.Module):
    """Attention with one matrix: x + softmax(W x x^T) x."""

    def __init__(self, width: int):
        super().__init__()
        self.look = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.look(x) @ x.mT).softmax(-1) @ x


class MeanOverPositions(nn.Module):
    """(samples, positions, width) to (samples, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def build_tiny_text_net(outputs: int = 2, pooled: bool = True) -> Net:
    """An embedding of width 3, attention, and so many outputs of their mean or of each of 4 positions, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        module = nn.Sequential()
        module.add_module("words", nn.Embedding(TINY_WORDS, 3))
        module.add_module("attention", TinyAttention(3))
        if pooled:
            module.add_module("mean", MeanOverPositions())
        module.add_module("b", nn.Linear(3, outputs))
    blocks = (Block("words", ("words",)), Block("b", tuple(name for name, _ in list(module.named_children())[1:])))
    return Net(module.double(), (4,), outputs, blocks=blocks, token_inputs=True)


def prepare_local_trainings(loop: Loop, server_state: ServerState, number: int = 0) -> list[LocalTraining]:
    """The local training of every device of a loop, before its first step in a round."""
    training_setup, method, devices = loop.host.setup, loop.method, list(range(len(loop.sizes)))
    round = replace(loop.make_round(server_state, number, EnrolmentRegister({}, loop.host.enrol)), devices=devices)
    plans, states = method.plan({d: WHOLE_MODEL for d in devices}, server_state.states, round)
    round = replace(round, plans=plans)
    beside, states = method.send(states, round)
    jobs, _ = loop.exchange.pack_jobs(round, beside, states)
    memory = loop.host.memory
    return [prepare_training(training_setup, job, memory.get(job.device)) for job in jobs]


def make_step_contexts(method: Method, training: LocalTraining) -> list[StepContext]:
    """The context of each local step of a device, with the random draws that the engine `serial` would make."""
    devices = {part.name(): training.device_for_part(part.name()) for part in method.parts_at("draw")}
    generators = {name: device.generator("draw") for name, device in devices.items()}

    def draw_for_step(step: int) -> dict[str, dict[str, Tensor]]:
        return {p.name(): p.draw(generators[p.name()], devices[p.name()], step) for p in method.parts_at("draw")}

    return [training.context_at_step(step, draw_for_step(step)) for step in range(len(training.rows))]


def refuse_unvectorisable(part: Part, setting: SmokeSetup) -> None:
    """Refuse a part that cannot be vectorised, such as one that branches on the value of a tensor."""
    try:
        step_two_devices(Method((part,)), setting)
    except ShoalError:
        raise
    except Exception as error:
        if not can_vectorise(setting):
            return  # nor does the model without the part
        raise broken_rule_error(
            part,
            "objective, gradient or step",
            describe_obstacle(error),
            "Use torch.where and other tensor operations instead.",
        ) from error


def describe_obstacle(error: Exception) -> str:
    """Why a step cannot be vectorised, from what was raised when that was tried."""
    text = str(error).split("\n")[0]
    branch = "data-dependent control flow" in text or ".item()" in text
    if "random operation" in text:
        return "draws random numbers that nobody can give it, as dropout inside of fused attention does"
    return "branches on the value of a tensor" if branch else f"cannot be vectorised ({text[:160]})"


def step_two_devices(method: Method, setting: SmokeSetup) -> None:
    """Make the first step of a device for two slots in one call, as the engine `batched` does."""
    loop, net = build_tiny_run(method, (sum(setting.sizes) // 2,) * 2, setting=setting)
    task = Task(loop.host.setup, prepare_local_trainings(loop, loop.start(net))[0].job, {})
    stack = DeviceStack([DeviceSlot(task), DeviceSlot(task)], (), 2, 2, channels_last=False)
    padded, inputs = next(stack.step_inputs.iterate_steps())
    with torch.no_grad():
        build_step(stack, padded)(stack.stack_initial_states(), stack.stack_constants(), [*stack.data, *inputs])


def can_vectorise(setting: SmokeSetup) -> bool:
    """Whether the model without any part can be vectorised."""
    try:
        step_two_devices(Method(), setting)
    except Exception:
        return False
    return True
