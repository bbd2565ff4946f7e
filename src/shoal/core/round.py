"""The training loop: the two halves of a round of any method, from the selection of devices to the new model.

Its methods follow the table of points in `Part`.
"""

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np

from shoal.core.batch import Samples
from shoal.core.cohort import check_cohort, draw_uniform_cohort
from shoal.core.compose import Method
from shoal.core.device_host import DeviceHost
from shoal.core.exchange import Exchange
from shoal.core.extra_checks import find_card_fault
from shoal.core.faulty_replies import use_without_culprits
from shoal.core.fleet_protocol import Fleet
from shoal.core.ledger import Deadlines, Row, add_evaluation, compute_round_cost, simulate_device_times
from shoal.core.metric import Metric, list_part_metrics
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params, Tree
from shoal.core.optimiser import Optimiser
from shoal.core.phases import in_phase
from shoal.core.server_state import EnrolmentRegister, MissingEnrolment, ServerState
from shoal.core.server_update import ServerUpdate, update_with_usable
from shoal.core.streams import RandomStreams
from shoal.core.telling import TOLD, Telling
from shoal.core.types import SERVER, Job, Outcome, Roster, Round, Work
from shoal.core.wire import REQUEST

log = logging.getLogger("shoal")
Host = TypeVar("Host", bound=DeviceHost)


@dataclass(frozen=True, eq=False)
class PendingRound:
    """A round whose jobs are packed; devices are about to train."""

    server_state: ServerState
    round: Round
    states: dict[str, Tree]
    jobs: list[Job]
    failed: frozenset[int]
    """Devices that will not reply in this round (simulated failures)."""
    register: EnrolmentRegister
    wall: float
    """Seconds of real time that opening the round took."""

    @property
    def jobs_to_train(self) -> list[Job]:
        """The jobs of the devices that do not fail."""
        return [job for job in self.jobs if job.device not in self.failed]


@dataclass(frozen=True, eq=False)
class Loop(Generic[Host]):
    """Plays rounds, whatever the method, the model and the place where devices train."""

    method: Method
    host: Host
    fleet: Fleet
    streams: RandomStreams
    sizes: np.ndarray
    sample: int
    work: Callable[[int, int], Work]
    """(round, device) -> how long it trains, with which batch size and learning rate."""
    evaluate_model: Callable[[Net, Params], dict[str, float]]
    """Metrics of a model on the test set."""
    evaluates: Callable[[Row], bool]
    """Row of costs -> whether the model is evaluated after this round."""
    optimiser: Optimiser = Optimiser()
    deadlines: Deadlines = Deadlines()
    server: Samples | None = None
    measure_replies: Callable[[Round], Row] = lambda round: {}
    """Metrics of a round's replies (of local models), in rounds that are evaluated."""
    test_devices: Callable[[ServerState, Params, int], Row] = lambda server_state, params, number: {}
    """(server state, judged model, round) -> metrics on the devices' own test samples, in rounds that are evaluated.

    Where that moves bytes, they are in the row as `bytes_by`.
    """
    tells: bool = True
    """Whether what parts tell is kept."""
    tell_every: int = 1
    """Rounds between those in which devices are asked to tell."""

    @cached_property
    def part_metrics(self) -> dict[str, Metric]:
        """What the parts of the method may tell, by column."""
        return list_part_metrics(self.method)

    @cached_property
    def exchange(self) -> Exchange:
        """Packs jobs and opens replies."""
        return Exchange(self.method, self.streams, self.sizes, self.work, self.server, self.host.is_untrusted)

    def start(self, net: Net) -> ServerState:
        """The server state before the first round; `net` is what the parts' `model` made of the recipe's model.

        Devices whose enrolment cards a part cannot use are left out here and named in the log.
        """
        server_state = ServerState(net, net.initial, {})
        register = self.make_register(server_state)
        with_data = np.flatnonzero(self.sizes > 0).tolist()
        words: list[tuple[str, str]] = []

        def init_states(devices: list[int]) -> dict[str, Tree]:
            while True:  # devices whose cards are missing or not as declared are left out until none is
                without = {*with_data, *register.silent} - (set(devices) - register.silent)
                try:
                    round = self.make_round(server_state, 0, register, without)
                    states = self.method.init_server(round)
                    words[:] = round.telling.words
                    return states
                except MissingEnrolment as error:
                    if without.issuperset(error.devices):
                        raise

        try:
            states = init_states(with_data)
        except Exception:
            if not (register.cards or register.silent):
                raise
            card_outline = lambda device: tree.outline_tree(register.cards.get(device))  # noqa: E731
            states, refused = use_without_culprits(with_data, init_states, card_outline, self.host.is_untrusted)
            for position, why in refused.items():
                log.warning("device %d, enrolment: %s", with_data[position], why)
        for part, text in words:
            log.info("%s: %s", part, text)
        return replace(server_state, states=states, cards=register.cards, owed=register.nbytes)

    def open_round(self, server_state: ServerState, number: int) -> "PendingRound":
        """The first half of a round: select -> plan -> send -> encode.

        Where a part needs enrolment cards that devices do not send, the round is opened again without those devices.
        """
        register = self.make_register(server_state)
        while True:
            without = frozenset(register.silent)
            try:
                return self.open_round_without(server_state, number, register, without)
            except MissingEnrolment as error:
                if without.issuperset(error.devices):
                    raise

    def open_round_without(
        self, server_state: ServerState, number: int, register: EnrolmentRegister, without: Set[int]
    ) -> "PendingRound":
        """The first half of a round in which the devices `without` count as holding no data."""
        started, method, states = perf_counter(), self.method, server_state.states
        round = self.make_round(server_state, number, register, without)

        devices, states = method.select(draw_uniform_cohort(round, self.sizes), states, round)
        round = replace(round, devices=check_cohort(devices, self.sizes, self.server))
        plans, states = method.plan({d: WHOLE_MODEL for d in round.devices}, states, round)
        round = replace(round, plans=plans)
        beside, states = method.send(states, round)
        if (number + 1) % self.tell_every == 0 and any(metric.on_device for metric in self.part_metrics.values()):
            beside = {device: extras | {TOLD: {"numbers": REQUEST}} for device, extras in beside.items()}
        jobs, states = self.exchange.pack_jobs(round, beside, states)
        failed = frozenset(j.device for j in jobs if self.deadlines.device_fails(self.streams, j.round, j.device))
        return PendingRound(server_state, round, states, jobs, failed, register, perf_counter() - started)

    def close_round(
        self, pending: "PendingRound", trained_outcomes: Sequence[Outcome], wall: float
    ) -> tuple[ServerState, Row]:
        """The second half of a round: decode -> sift -> weigh -> combine -> serve -> prune -> observe -> evaluate.

        `wall` is how many seconds of real time training took.
        """
        started, server_state = perf_counter(), pending.server_state
        round, states, jobs, register = pending.round, pending.states, pending.jobs, pending.register
        by_device = {outcome.device: outcome for outcome in trained_outcomes}
        outcomes = [by_device.get(j.device, Outcome(j.device, problem="it failed")) for j in jobs]
        outcomes = [self.exchange.cap_claims(job, outcome, round.net) for job, outcome in zip(jobs, outcomes)]
        times = simulate_device_times(jobs, outcomes, self.fleet)
        totals, jobs_sent = {d: t.total for d, t in times.items()}, sum(j.device != SERVER for j in jobs)
        late_devices, end = self.deadlines.find_late_devices(totals, self.sample, jobs_sent)

        replies, dropped = self.exchange.decode_replies(jobs, outcomes, round, late_devices)
        round = replace(round, replies=replies)
        rehearse = (lambda update: self.rehearse_next_round(update, register)) if self.host.is_untrusted else None
        update, refused = update_with_usable(self.method, server_state, round, states, rehearse)
        dropped += [{"device": device, "why": why} for device, why in refused.items()]
        self.host.forget([gone["device"] for gone in dropped if gone["device"] not in late_devices])
        enrolment = server_state.owed + register.nbytes
        round, server_state = update.round, replace(update.after, cards=register.cards, owed=0)
        if update.void:  # what was told and remembered after training belongs to an update that was thrown away
            self.host.forget([job.device for job in jobs])
            round = replace(round, telling=pending.round.telling.copy())

        row = compute_round_cost(
            jobs, outcomes, enrolment, round.number, self.fleet, times, end, round.net.task.columns
        )
        if self.evaluates(row):
            judged_round = replace(round, net=server_state.net, params=server_state.params)
            row = add_evaluation(row, self.evaluate_state(server_state, judged_round) | self.measure_replies(round))
        row |= round.telling.make_row([] if update.void else round.replies)
        if dropped:
            row["dropped"] = dropped
        if update.void:
            row["void"] = True
        return server_state, row | {"wall_seconds": pending.wall + wall + perf_counter() - started}

    def rehearse_next_round(self, update: ServerUpdate, register: EnrolmentRegister) -> None:
        """Evaluate and open the next round on trial, to raise now what an untrusted reply would make it raise then."""
        after, number = update.after, update.round.number + 1
        on_trial = replace(update.round, net=after.net, params=after.params, telling=Telling(self.part_metrics))
        self.method.evaluate({"": after.params}, after.states, on_trial)
        with suppress(MissingEnrolment):
            self.open_round_without(
                after, number, EnrolmentRegister(register.cards, lambda devices: {}), register.silent
            )

    def make_final_params(self, server_state: ServerState, rounds: int) -> Params:
        """The model that a run ends with: the one that is evaluated under the name ""."""
        round = self.make_round(server_state, max(rounds - 1, 0), self.make_register(server_state))
        return self.method.evaluate({"": server_state.params}, server_state.states, round)[""]

    def follow_pruning(self, before: ServerState, after: ServerState) -> None:
        """Tell the host to train the smaller model where the committed round has pruned it."""
        if after.net is not before.net:
            self.host.resize(after.net, after.cuts[-1])

    def make_register(self, server_state: ServerState) -> EnrolmentRegister:
        """The register of a round: cards known before it, and those fetched in it, if they are as parts declare."""
        find_fault = lambda card: find_card_fault(self.method, card, server_state.net)  # noqa: E731
        return EnrolmentRegister(server_state.cards, self.host.enrol, find_fault)

    # the steps of a round, in their order -------------------------------------------------------------------------
    def make_round(
        self, server_state: ServerState, number: int, roster: Roster, without: Set[int] = frozenset()
    ) -> Round:
        """The round before any device is selected; the devices `without` count as holding no data."""
        return Round(
            number=number,
            net=server_state.net,
            anchor=server_state.params,
            sizes=np.where(np.isin(np.arange(len(self.sizes)), list(without)), 0, self.sizes)
            if without
            else self.sizes,
            sample=self.deadlines.count_devices_to_ask(self.sample),
            streams=self.streams,
            roster=roster,
            work=self.work(number, SERVER),
            optimiser=self.optimiser,
            fleet=self.fleet,
            server=self.server,
            learn=lambda params, work: self.host.train_on_server(params, work, number),
            own_weights=any("weigh" in part.sets for part in self.method.parts),
            telling=Telling(self.part_metrics, silent=not self.tells),
        )

    @in_phase("evaluate")
    def evaluate_state(self, server_state: ServerState, round: Round) -> Row:
        """The metrics of the global model, and of further models that parts evaluate, with _NAME behind theirs."""
        metrics: Row = {}
        for name, params in self.method.evaluate({"": server_state.params}, server_state.states, round).items():
            suffix = f"_{name}" if name else ""
            metrics |= {f"{k}{suffix}": v for k, v in self.evaluate_model(server_state.net, params).items()}
            if not name:
                metrics |= self.test_devices(server_state, params, round.number)
        return metrics
