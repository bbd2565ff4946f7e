"""The round: one loop for every method, written once. It reads like the table of points in `Part`."""

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Protocol

import numpy as np

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.exchange import Post
from shoal.core.faulty_replies import use_without_culprits
from shoal.core.ledger import Patience, Row, by_blocks, cost, times_of
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE, Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.server_state import Card, Register, Standing, Unintroduced
from shoal.core.server_update import Conclusion, conclude_with_usable
from shoal.core.streams import Streams
from shoal.core.types import SERVER, Fleet, Job, Optimiser, Outcome, Roster, Round, Samples, Work

log = logging.getLogger("shoal")


class Engine(Protocol):
    """Where devices train; the only thing that differs between a laptop, a cluster and real devices."""

    def fit(self, jobs: Sequence[Job]) -> list[Outcome]: ...

    def learn(self, params: Params, work: Work, number: int) -> Params:
        """Where the server's own training takes these parameters; no part has a say in it."""
        ...

    def enrol(self, devices: Sequence[int]) -> dict[int, Card]: ...

    def forget(self, devices: Sequence[int]) -> None:
        """Their answers were of no use: they remember what they did before this round."""
        ...

    def resize(self, net: Net, plan: Plan) -> None: ...

    @property
    def untrusted(self) -> bool:
        """Whether devices are elsewhere, so that what they say may be anything."""
        ...


@dataclass(frozen=True, eq=False)
class Asked:
    """A round at half-time: devices are about to train."""

    standing: Standing
    round: Round
    states: dict[str, Tree]
    jobs: list[Job]
    failed: frozenset[int]
    """Devices that will never answer."""
    register: Register
    wall: float
    """Seconds it took to get here."""

    @property
    def wanted(self) -> list[Job]:
        """The jobs that will be answered."""
        return [job for job in self.jobs if job.device not in self.failed]


@dataclass(frozen=True, eq=False)
class Loop:
    """Plays rounds. Nothing here knows the name of a method, of a model, or of the place where devices train."""

    method: Method
    engine: Engine
    fleet: Fleet
    streams: Streams
    sizes: np.ndarray
    sample: int
    work: Callable[[int, int], Work]
    """(round, device) -> how much it trains."""
    judge: Callable[[Net, Params], dict[str, float]]
    evaluates: Callable[[Row], bool]
    """Whether the round of this row is one to evaluate."""
    optimiser: Optimiser = Optimiser()
    patience: Patience = Patience()
    server: Samples | None = None
    look: Callable[[Round], Row] = lambda round: {}
    """What is to be told of the replies in a round that is evaluated."""

    @cached_property
    def post(self) -> Post:
        return Post(self.method, self.streams, self.sizes, self.work, self.server, self.engine.untrusted)

    def start(self, net: Net) -> Standing:
        """Before the first round; `net` already went through the parts' `model`."""
        standing = Standing(net, net.initial, {})
        register = Register({}, self.engine.enrol)
        everybody = np.flatnonzero(self.sizes > 0).tolist()

        def first_states(devices: list[int]) -> dict[str, Tree]:
            return self.method.init_server(self.opening(standing, 0, register, set(everybody) - set(devices)))

        try:
            states = first_states(everybody)
        except Exception:
            if not (register.cards or register.silent):
                raise
            form = lambda device: tree.outline(register.cards.get(device))  # noqa: E731
            states, refused = use_without_culprits(everybody, first_states, form, self.engine.untrusted)
            for at, why in refused.items():
                log.warning("device %d, enrolment: %s", everybody[at], why)
        return replace(standing, states=states, cards=register.cards, owed=register.nbytes)

    def play(self, standing: Standing, number: int) -> tuple[Standing, Row]:
        """One round, from what the server knew before it to what it knows after it."""
        asked = self.ask(standing, number)
        began = perf_counter()
        outcomes = self.engine.fit(asked.wanted)
        return self.take(asked, outcomes, perf_counter() - began)

    def ask(self, standing: Standing, number: int) -> "Asked":
        """The first half of a round: what each device is told. Who does not introduce itself is left out of it."""
        register = Register(standing.cards, self.engine.enrol)
        while True:
            without = frozenset(register.silent)
            try:
                return self.asked(standing, number, register, without)
            except Unintroduced as error:
                if without.issuperset(error.devices):
                    raise

    def asked(self, standing: Standing, number: int, register: Register, without: Set[int]) -> "Asked":
        began, method, states = perf_counter(), self.method, standing.states
        round = self.opening(standing, number, register, without)

        devices, states = method.select(self.drawn(round), states, round)
        round = replace(round, devices=self.checked(devices))
        plans, states = method.plan({d: WHOLE for d in round.devices}, states, round)
        round = replace(round, plans=plans)
        beside, states = method.send(states, round)
        jobs, states = self.post.jobs(round, beside, states)
        failed = frozenset(j.device for j in jobs if self.patience.fails(self.streams, j.round, j.device))
        return Asked(standing, round, states, jobs, failed, register, perf_counter() - began)

    def take(self, asked: "Asked", trained: Sequence[Outcome], wall: float) -> tuple[Standing, Row]:
        """The second half: what came back becomes the new model. `wall` is how long devices took to train it."""
        began, standing = perf_counter(), asked.standing
        round, states, jobs, register = asked.round, asked.states, asked.jobs, asked.register
        found = {outcome.device: outcome for outcome in trained}
        outcomes = [found.get(j.device, Outcome(j.device, problem="it failed")) for j in jobs]
        outcomes = [self.post.credible(job, outcome, round.net) for job, outcome in zip(jobs, outcomes)]
        times = times_of(jobs, outcomes, self.fleet)
        totals, asked_for = {d: t.total for d, t in times.items()}, sum(j.device != SERVER for j in jobs)
        late, end = self.patience.late(totals, self.sample, asked_for)

        replies, dropped = self.post.replies(jobs, outcomes, round, late)
        round = replace(round, replies=replies)
        rehearse = (lambda made: self.rehearse(made, register)) if self.engine.untrusted else None
        made, refused = conclude_with_usable(self.method, standing, round, states, rehearse)
        dropped += [{"device": device, "why": why} for device, why in refused.items()]
        self.engine.forget([gone["device"] for gone in dropped if gone["device"] not in late])
        enrolment = standing.owed + register.nbytes
        round, standing = made.round, replace(made.after, cards=register.cards, owed=0)

        row = cost(jobs, outcomes, enrolment, round.number, self.fleet, times, end)
        if round.net.blocks and any(codec.stage == "rows" for codec in self.method.codecs("down")):
            row["bytes_down_by_blocks"] = by_blocks(jobs, round.net)
        if self.evaluates(row):
            row |= self.judged(standing, replace(round, net=standing.net, params=standing.params)) | self.look(round)
        if dropped:
            row["dropped"] = dropped
        if made.void:
            row["void"] = True
        return standing, row | {"wall_seconds": asked.wall + wall + perf_counter() - began}

    def rehearse(self, made: Conclusion, register: Register) -> None:
        """Raise what the next round would raise with what was made of this one."""
        after, number = made.after, made.round.number + 1
        self.method.evaluate({"": after.params}, after.states, replace(made.round, net=after.net, params=after.params))
        with suppress(Unintroduced):
            self.asked(after, number, Register(register.cards, lambda devices: {}), register.silent)

    def final(self, standing: Standing, rounds: int) -> Params:
        """The model that a run ends with: the one that is judged."""
        round = self.opening(standing, max(rounds - 1, 0), Register(standing.cards, self.engine.enrol))
        return self.method.evaluate({"": standing.params}, standing.states, round)[""]

    def settle(self, before: Standing, after: Standing) -> None:
        """The round is over and kept: the places where devices train follow a model that was pruned."""
        if after.net is not before.net:
            self.engine.resize(after.net, after.cuts[-1])

    # the steps of a round, in their order -------------------------------------------------------------------------
    def opening(self, standing: Standing, number: int, roster: Roster, without: Set[int] = frozenset()) -> Round:
        """A round before anybody was asked; the devices `without` whom it is played count as holding nothing."""
        return Round(
            number=number,
            net=standing.net,
            anchor=standing.params,
            sizes=np.where(np.isin(np.arange(len(self.sizes)), list(without)), 0, self.sizes)
            if without
            else self.sizes,
            sample=self.patience.asked(self.sample),
            streams=self.streams,
            roster=roster,
            work=self.work(number, SERVER),
            optimiser=self.optimiser,
            fleet=self.fleet,
            server=self.server,
            learn=lambda params, work: self.engine.learn(params, work, number),
            own_weights=any("weigh" in part.sets for part in self.method.parts),
        )

    def drawn(self, round: Round) -> list[int]:
        """The devices that take part unless a part says otherwise: a uniform draw among those with data."""
        eligible = round.eligible
        if not (self.sizes > 0).any():
            raise ShoalError("no-data", "No device holds any data.", "Use fewer devices or another split.")
        generator = self.streams.numpy("select", round.number)
        chosen = generator.choice(len(eligible), min(round.sample, len(eligible)), replace=False, shuffle=False)
        return sorted(int(eligible[i]) for i in chosen)

    def checked(self, devices: Sequence[int]) -> list[int]:
        unknown = [d for d in devices if d != SERVER and not (0 <= d < len(self.sizes) and self.sizes[d] > 0)]
        if unknown or len(set(devices)) != len(devices):
            problem = (
                f"The selection {list(devices)[:8]} names a device twice, or one that does not exist or has no data."
            )
            raise ShoalError(
                "bad-part", problem, "A part's `select` must return different devices of `round.eligible`."
            )
        if SERVER in devices and self.server is None:
            raise ShoalError(
                "no-data", "The server takes part but has no data.", "Give it some: --server-data share:0.05."
            )
        return list(devices)

    def judged(self, standing: Standing, round: Round) -> Row:
        """The quality of the model; of further models under their own names."""
        found: Row = {}
        for name, params in self.method.evaluate({"": standing.params}, standing.states, round).items():
            suffix = f"_{name}" if name else ""
            found |= {f"{k}{suffix}": v for k, v in self.judge(standing.net, params).items()}
        return found
