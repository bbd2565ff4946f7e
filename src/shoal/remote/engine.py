"""The engine for devices that are elsewhere: data and memories stay with them, and what they send is untrusted."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from secrets import token_hex
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.local.device import TrainingSetup
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.types import SERVER, Job, Outcome
from shoal.engines.base import Task, TaskResult
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.remote.messages import REPLY_SLACK_BYTES, RequestStamp, TrainRequest, read_enrolment_bytes, read_reply_bytes
from shoal.remote.tree_bytes import tree_to_bytes
from shoal.storage.memory import DeviceMemory

log = logging.getLogger("shoal")
MEMORY_ROUND_KEY = ".since"
"""Under this name the server notes of which round a device's memory is; the memory itself is the device's."""
MAX_CLAIMED_SAMPLES = 10**8
"""More samples than this no device may claim."""


class Transport(Protocol):
    """Carries questions to devices and brings what they answer."""

    def exchange(self, questions: Mapping[int, bytes], kind: str, seconds: float) -> Iterator[tuple[int, bytes | str]]:
        """For each device exactly once, as they come in: its answer, or in words why there is none."""
        ...


class RemoteEngine:
    """A crew of real devices; what the server does itself, it does here."""

    def __init__(self, post: Transport, run: str, setup: dict[str, Any], seconds: float, bound: float):
        self.post, self.run, self.setup, self.seconds, self.bound = post, run, setup, seconds, bound
        self.cuts: tuple[Plan, ...] = ()
        self.here = SerialEngine()

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        away = [task for task in tasks if task.job.device != SERVER]
        orders = {task.job.device: self.build_request(task) for task in away}
        heard = self.collect_replies({d: order.to_bytes() for d, order in orders.items()}, "train") if away else {}
        sites = {task.job.device: task.site for task in away}
        done = refuse_odd_reports({d: self.read_reply(heard[d], order, sites[d]) for d, order in orders.items()})
        for device, (outcome, _) in done.items():
            if outcome.problem:
                log.warning("device %d, round %d: %s", device, orders[device].job.round, outcome.problem)
        return [done[t.job.device] if t.job.device in done else self.here.train([t])[0] for t in tasks]

    def build_request(self, task: Task) -> TrainRequest:
        job, known = task.job, task.memory.get(MEMORY_ROUND_KEY)
        since = None if known is None else (int(known["round"]), int(known["cuts"]))
        stamp = RequestStamp(self.run, job.round, job.device, token_hex(8))
        return TrainRequest(stamp, self.setup, job, self.cuts, since, self.seconds)

    def read_reply(self, answer: bytes | str, order: TrainRequest, site: TrainingSetup) -> TaskResult:
        """What came of an order; of the device's memory the server notes when it was made."""
        job: Job = order.job
        if isinstance(answer, str):
            return TaskResult(Outcome(job.device, problem=answer), {})
        try:
            coded = bool(site.method.codecs_for("up"))
            outcome, remembers = read_reply_bytes(answer, order.stamp, job, site.net, coded, self.bound)
        except ShoalError as error:
            return TaskResult(Outcome(job.device, problem=error.problem), {})
        when = {"round": torch.tensor(job.round), "cuts": torch.tensor(len(order.cuts))}
        return TaskResult(outcome, {MEMORY_ROUND_KEY: when} if remembers else {})

    def collect_replies(self, questions: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        return dict(self.post.exchange(questions, kind, self.seconds))

    def enrol_devices(self, devices: Sequence[int], most: int) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """What devices tell of themselves; of those that cannot be understood, nothing."""
        stamps = {d: RequestStamp(self.run, -1, d, token_hex(8)) for d in devices}
        questions = {d: tree_to_bytes({"stamp": asdict(s), "setup": self.setup}) for d, s in stamps.items()}
        found = {}
        for device, answer in self.collect_replies(questions, "enrol").items():
            try:
                if isinstance(answer, str):
                    raise ShoalError("damaged", answer, "It was not used.")
                found[device] = read_enrolment_bytes(answer, stamps[device], most, MAX_CLAIMED_SAMPLES)
            except ShoalError as error:
                log.warning("device %d, enrolment: %s", device, error.problem)
        for device in find_odd_devices({d: tree.outline_tree(card) for d, (_, card) in found.items()}):
            log.warning("device %d, enrolment: it introduces itself with something else than others do", device)
            del found[device]
        return found

    def close(self) -> None:
        pass


class RemoteDevices(LocalDevices):
    """Devices of one run that are not on this machine."""

    is_untrusted = True

    def __init__(self, site: TrainingSetup, memory: DeviceMemory, crew: RemoteEngine):
        super().__init__(site, memory, crew)
        self.remote = crew
        self.cards: dict[int, dict[str, Tensor]] = {}
        """Of devices that were asked, and whose cards nobody has wanted yet."""

    def make_tasks(self, jobs: Sequence[Job]) -> list[Task]:
        own = iter(super().make_tasks([job for job in jobs if job.device == SERVER]))
        self.plans = {job.device: job.plan for job in jobs}
        there = lambda job: Task(self.site, job, self.memory.get(job.device))  # noqa: E731
        return [next(own) if job.device == SERVER else there(job) for job in jobs]

    def store_results(self, done: Sequence[TaskResult]) -> list[Outcome]:
        super().store_results([one for one in done if one.outcome.device == SERVER])
        for outcome, memory in done:
            if outcome.message is not None and outcome.device != SERVER:
                self.memory.put(outcome.device, memory)
        return [outcome for outcome, _ in done]

    def ask_sample_counts(self, devices: Sequence[int]) -> dict[int, int]:
        """How many samples each device that is there has."""
        found = self.remote.enrol_devices(devices, tree.count_tree_bytes(self.site.net.initial) + REPLY_SLACK_BYTES)
        self.cards |= {device: card for device, (_, card) in found.items()}
        return {device: size for device, (size, _) in found.items()}

    def enrol(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """What devices told about themselves; nothing of those that did not."""
        unknown = [d for d in devices if d not in self.cards]
        if unknown:
            self.ask_sample_counts(unknown)
        return {d: self.cards[d] for d in devices if d in self.cards}

    def resize(self, net: Net, plan: Plan) -> None:
        super().resize(net, plan)
        self.remote.cuts = (*self.remote.cuts, plan)


def refuse_odd_reports(done: dict[int, TaskResult]) -> dict[int, TaskResult]:
    """All devices report the same things; who differs from more than half of them is refused."""
    reports = {d: outcome.message.beside for d, (outcome, _) in done.items() if outcome.message}
    strange = find_odd_devices({d: describe_report(own) for d, own in reports.items()})
    return done | {
        d: TaskResult(Outcome(d, problem="A message reports something else than others do."), {}) for d in strange
    }


def find_odd_devices(forms: Mapping[int, Hashable]) -> list[int]:
    """The devices whose form is not the one that more than half of them have; nobody where there is no such form."""
    [(usual, count)] = Counter(forms.values()).most_common(1) or [(None, 0)]
    return [d for d, own in forms.items() if own != usual] if 2 * count > len(forms) else []


def describe_report(report: Any) -> Hashable:
    """The names in a report, and the type and number of dimensions of each tensor: lengths may differ (labels held)."""
    if isinstance(report, Tensor):
        return report.dtype, report.dim()
    return frozenset((name, describe_report(own)) for name, own in report.items())
