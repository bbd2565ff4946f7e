"""The objects that points of a part are given, made by hand: for tests that work a method's numbers out on paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.batch import Batch
from shoal.core.compose import Method, compose
from shoal.core.expression import parse_method
from shoal.core.ledger import Row
from shoal.core.local.device import LocalTraining
from shoal.core.model.inputs import Inputs
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.optimiser import Optimiser
from shoal.core.part import Part
from shoal.core.server_state import EnrolmentRegister, ServerState
from shoal.core.session import Session, play_round
from shoal.core.task import Engine
from shoal.core.types import Device, Local, Outcome, Reply, Round
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.smoke_run import SmokeSetup, build_tiny_run, make_tiny_setup, prepare_local_trainings


def toy(
    method: str | Part | Sequence[Part] = (),
    *,
    sizes: Sequence[int] = (5, 3),
    net: Net | None = None,
    inputs: Inputs | None = None,
    targets: Tensor | None = None,
    lr: float = 0.1,
    momentum: float = 0.0,
    engine: Engine | None = None,
    optimiser: Optimiser | None = None,
) -> "Toy":
    """A run in miniature: devices with `sizes` samples each, batches of 2, and a server with 4 samples.

    Its model is a perceptron of 4 inputs, 3 hidden units and 2 classes in 64 bits, unless `net` is another one, with
    `inputs` and `targets` for it: first the samples of the devices, then 4 of the server.
    """
    parsed = make_method(method)
    setting = make_tiny_setup(sum(sizes) + 4, *parsed.parts)
    if net is not None and inputs is not None and targets is not None:
        setting = SmokeSetup(net, inputs, targets)
    loop, own_net = build_tiny_run(parsed, tuple(sizes), momentum, None, engine, replace(setting, lr=lr), optimiser)
    return Toy(Session(loop, own_net, loop.start(own_net)))


def make_method(method: str | Part | Sequence[Part]) -> Method:
    """The method of an expression, a part or several parts."""
    if isinstance(method, str):
        return parse_method(method, find_shipped_parts(), PRESETS)
    return compose([method] if isinstance(method, Part) else list(method))


@dataclass(frozen=True, eq=False)
class Toy:
    """A run in miniature, and the objects that the points of its parts are given in it; each is whole and real."""

    session: Session

    @property
    def server_state(self) -> ServerState:
        assert self.session.server_state is not None
        return self.session.server_state

    @property
    def net(self) -> Net:
        return self.server_state.net

    @property
    def params(self) -> Params:
        """The global model."""
        return self.server_state.params

    @property
    def states(self) -> dict[str, Tree]:
        """The states of the parts on the server, by part."""
        return self.server_state.states

    def play(self, rounds: int = 1) -> list[Row]:
        """Play some rounds, and return their rows."""
        return [play_round(self.session) for _ in range(rounds)]

    def memory(self, device: int) -> dict[str, Tree]:
        """What a device remembers, by part."""
        return self.session.loop.host.memory.get(device)

    def round(
        self, part: str = "", replies: Sequence[Reply] = (), weights: Sequence[float] = (), **given: Any
    ) -> Round:
        """The next round as a part sees it on the server, with these replies and weights (by default equal ones)."""
        loop = self.session.loop
        shares = torch.tensor(list(weights) or [1 / max(1, len(replies))] * len(replies), dtype=self.net.dtype)
        fields = {
            "devices": list(range(len(loop.sizes))),
            "plans": {device: WHOLE_MODEL for device in range(len(loop.sizes))},
            "replies": list(replies),
            "weights": shares,
            "params": self.params,
            "part": part,
        }
        roster = EnrolmentRegister(self.server_state.cards, loop.host.enrol)
        return replace(loop.make_round(self.server_state, self.session.number, roster), **fields | given)

    def reply(
        self,
        device: int = 0,
        delta: float | Params = 0.0,
        report: Mapping[str, Mapping[str, Any]] | None = None,
        covered: dict[str, Tensor] | None = None,
        plan: Plan = WHOLE_MODEL,
        size: int | None = None,
        **outcome: Any,
    ) -> Reply:
        """A device's reply in the next round; a number for `delta` fills every tensor of the model.

        Further keywords (steps, samples, loss, macs_work, ...) are those of its `Outcome`.
        """
        names = self.net.names_with_role("shared")
        if isinstance(delta, (int, float)):
            delta = {name: torch.full_like(self.params[name], delta) for name in names}
        size = int(self.session.loop.sizes[device]) if size is None else size
        extras, masks = dict(report or {}), dict(covered or {})
        done, number = Outcome(device, **dict[str, Any](steps=1, samples=size) | outcome), self.session.number
        return Reply(device, size, delta, masks, extras, done, plan, self.params, number)

    def device(self, device: int = 0, part: str = "", **given: Any) -> Device:
        """A device in the next round as a part sees it outside local steps."""
        return replace(self._prepare(device).device_for_part(part), **given)

    def local(self, device: int = 0, part: str = "", step: int = 0, **given: Any) -> Local:
        """What a part sees inside a local step of the next round; `state` is what its `begin` returned."""
        training = self._prepare(device)
        context = training.context_at_step(step, {})
        state = training.state.states.get(part, {})
        local = Local(self.net, context.anchor, context.got.get(part, {}), context.numbers, {}, state)
        return local._replace(**given)

    def batch(self, device: int = 0, step: int = 0) -> Batch:
        """The mini-batch of a local step of the next round."""
        training = self._prepare(device)
        return training.device.samples.take_batch(training.rows[step])

    def _prepare(self, device: int) -> LocalTraining:
        """A device's training in the next round, before its first step."""
        return prepare_local_trainings(self.session.loop, self.server_state, self.session.number)[device]
