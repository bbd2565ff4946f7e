"""The round: one loop for every method, written once. It reads like the table of points in `Part`."""

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from shoal.core.compose import Method
from shoal.core.device_host import DeviceHost
from shoal.core.errors import ShoalError
from shoal.core.exchange import Exchange
from shoal.core.faulty_replies import use_without_culprits
from shoal.core.fleet_protocol import Fleet
from shoal.core.ledger import Deadlines, Row, compute_round_cost, count_bytes_by_blocks, simulate_device_times
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params, Tree
from shoal.core.server_state import EnrolmentRegister, MissingEnrolment, ServerState
from shoal.core.server_update import ServerUpdate, update_with_usable
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Job, Optimiser, Outcome, Roster, Round, Samples, Work

log = logging.getLogger("shoal")


@dataclass(frozen=True, eq=False)
class PendingRound:
    """A round at half-time: devices are about to train."""

    server_state: ServerState
    round: Round
    states: dict[str, Tree]
    jobs: list[Job]
    failed: frozenset[int]
    """Devices that will never answer."""
    register: EnrolmentRegister
    wall: float
    """Seconds it took to get here."""

    @property
    def jobs_to_train(self) -> list[Job]:
        """The jobs that will be answered."""
        return [job for job in self.jobs if job.device not in self.failed]


@dataclass(frozen=True, eq=False)
class Loop:
    """Plays rounds. Nothing here knows the name of a method, of a model, or of the place where devices train."""

    method: Method
    engine: DeviceHost
    fleet: Fleet
    streams: RandomStreams
    sizes: np.ndarray
    sample: int
    work: Callable[[int, int], Work]
    """(round, device) -> how much it trains."""
    judge: Callable[[Net, Params], dict[str, float]]
    evaluates: Callable[[Row], bool]
    """Whether the round of this row is one to evaluate."""
    optimiser: Optimiser = Optimiser()
    patience: Deadlines = Deadlines()
    server: Samples | None = None
    look: Callable[[Round], Row] = lambda round: {}
    """What is to be told of the replies in a round that is evaluated."""

    @cached_property
    def exchange(self) -> Exchange:
        return Exchange(self.method, self.streams, self.sizes, self.work, self.server, self.engine.is_untrusted)

    def start(self, net: Net) -> ServerState:
        """Before the first round; `net` already went through the parts' `model`."""
        standing = ServerState(net, net.initial, {})
        register = EnrolmentRegister({}, self.engine.enrol)
        everybody = np.flatnonzero(self.sizes > 0).tolist()

        def init_states(devices: list[int]) -> dict[str, Tree]:
            return self.method.init_server(self.make_round(standing, 0, register, set(everybody) - set(devices)))

        try:
            states = init_states(everybody)
        except Exception:
            if not (register.cards or register.silent):
                raise
            form = lambda device: tree.outline_tree(register.cards.get(device))  # noqa: E731
            states, refused = use_without_culprits(everybody, init_states, form, self.engine.is_untrusted)
            for at, why in refused.items():
                log.warning("device %d, enrolment: %s", everybody[at], why)
        return replace(standing, states=states, cards=register.cards, owed=register.nbytes)

    def play_round(self, standing: ServerState, number: int) -> tuple[ServerState, Row]:
        """One round, from what the server knew before it to what it knows after it."""
        asked = self.open_round(standing, number)
        began = perf_counter()
        outcomes = self.engine.fit(asked.jobs_to_train)
        return self.close_round(asked, outcomes, perf_counter() - began)

    def open_round(self, standing: ServerState, number: int) -> "PendingRound":
        """The first half of a round: what each device is told. Who does not introduce itself is left out of it."""
        register = EnrolmentRegister(standing.cards, self.engine.enrol)
        while True:
            without = frozenset(register.silent)
            try:
                return self.open_round_without(standing, number, register, without)
            except MissingEnrolment as error:
                if without.issuperset(error.devices):
                    raise

    def open_round_without(
        self, standing: ServerState, number: int, register: EnrolmentRegister, without: Set[int]
    ) -> "PendingRound":
        began, method, states = perf_counter(), self.method, standing.states
        round = self.make_round(standing, number, register, without)

        devices, states = method.select(self.draw_cohort(round), states, round)
        round = replace(round, devices=self.check_cohort(devices))
        plans, states = method.plan({d: WHOLE_MODEL for d in round.devices}, states, round)
        round = replace(round, plans=plans)
        beside, states = method.send(states, round)
        jobs, states = self.exchange.pack_jobs(round, beside, states)
        failed = frozenset(j.device for j in jobs if self.patience.device_fails(self.streams, j.round, j.device))
        return PendingRound(standing, round, states, jobs, failed, register, perf_counter() - began)

    def close_round(self, asked: "PendingRound", trained: Sequence[Outcome], wall: float) -> tuple[ServerState, Row]:
        """The second half: what came back becomes the new model. `wall` is how long devices took to train it."""
        began, standing = perf_counter(), asked.server_state
        round, states, jobs, register = asked.round, asked.states, asked.jobs, asked.register
        found = {outcome.device: outcome for outcome in trained}
        outcomes = [found.get(j.device, Outcome(j.device, problem="it failed")) for j in jobs]
        outcomes = [self.exchange.cap_claims(job, outcome, round.net) for job, outcome in zip(jobs, outcomes)]
        times = simulate_device_times(jobs, outcomes, self.fleet)
        totals, asked_for = {d: t.total for d, t in times.items()}, sum(j.device != SERVER for j in jobs)
        late, end = self.patience.find_late_devices(totals, self.sample, asked_for)

        replies, dropped = self.exchange.open_replies(jobs, outcomes, round, late)
        round = replace(round, replies=replies)
        rehearse = (lambda made: self.rehearse_next_round(made, register)) if self.engine.is_untrusted else None
        made, refused = update_with_usable(self.method, standing, round, states, rehearse)
        dropped += [{"device": device, "why": why} for device, why in refused.items()]
        self.engine.forget([gone["device"] for gone in dropped if gone["device"] not in late])
        enrolment = standing.owed + register.nbytes
        round, standing = made.round, replace(made.after, cards=register.cards, owed=0)

        row = compute_round_cost(jobs, outcomes, enrolment, round.number, self.fleet, times, end)
        if round.net.blocks and any(codec.stage == "rows" for codec in self.method.codecs_for("down")):
            row["bytes_down_by_blocks"] = count_bytes_by_blocks(jobs, round.net)
        if self.evaluates(row):
            row |= self.evaluate_state(standing, replace(round, net=standing.net, params=standing.params)) | self.look(
                round
            )
        if dropped:
            row["dropped"] = dropped
        if made.void:
            row["void"] = True
        return standing, row | {"wall_seconds": asked.wall + wall + perf_counter() - began}

    def rehearse_next_round(self, made: ServerUpdate, register: EnrolmentRegister) -> None:
        """Raise what the next round would raise with what was made of this one."""
        after, number = made.after, made.round.number + 1
        self.method.evaluate({"": after.params}, after.states, replace(made.round, net=after.net, params=after.params))
        with suppress(MissingEnrolment):
            self.open_round_without(
                after, number, EnrolmentRegister(register.cards, lambda devices: {}), register.silent
            )

    def make_final_params(self, standing: ServerState, rounds: int) -> Params:
        """The model that a run ends with: the one that is judged."""
        round = self.make_round(standing, max(rounds - 1, 0), EnrolmentRegister(standing.cards, self.engine.enrol))
        return self.method.evaluate({"": standing.params}, standing.states, round)[""]

    def follow_pruning(self, before: ServerState, after: ServerState) -> None:
        """The round is over and kept: the places where devices train follow a model that was pruned."""
        if after.net is not before.net:
            self.engine.resize(after.net, after.cuts[-1])

    # the steps of a round, in their order -------------------------------------------------------------------------
    def make_round(self, standing: ServerState, number: int, roster: Roster, without: Set[int] = frozenset()) -> Round:
        """A round before anybody was asked; the devices `without` whom it is played count as holding nothing."""
        return Round(
            number=number,
            net=standing.net,
            anchor=standing.params,
            sizes=np.where(np.isin(np.arange(len(self.sizes)), list(without)), 0, self.sizes)
            if without
            else self.sizes,
            sample=self.patience.count_devices_to_ask(self.sample),
            streams=self.streams,
            roster=roster,
            work=self.work(number, SERVER),
            optimiser=self.optimiser,
            fleet=self.fleet,
            server=self.server,
            learn=lambda params, work: self.engine.train_on_server(params, work, number),
            own_weights=any("weigh" in part.sets for part in self.method.parts),
        )

    def draw_cohort(self, round: Round) -> list[int]:
        """The devices that take part unless a part says otherwise: a uniform draw among those with data."""
        eligible = round.eligible
        if not (self.sizes > 0).any():
            raise ShoalError("no-data", "No device holds any data.", "Use fewer devices or another split.")
        generator = self.streams.make_numpy_generator("select", round.number)
        chosen = generator.choice(len(eligible), min(round.sample, len(eligible)), replace=False, shuffle=False)
        return sorted(int(eligible[i]) for i in chosen)

    def check_cohort(self, devices: Sequence[int]) -> list[int]:
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

    def evaluate_state(self, standing: ServerState, round: Round) -> Row:
        """The quality of the model; of further models under their own names."""
        found: Row = {}
        for name, params in self.method.evaluate({"": standing.params}, standing.states, round).items():
            suffix = f"_{name}" if name else ""
            found |= {f"{k}{suffix}": v for k, v in self.judge(standing.net, params).items()}
        return found
