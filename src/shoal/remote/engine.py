"""The engine for devices on other machines: requests go out, replies come back, and every reply is untrusted.

Data and memories stay with the devices.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.extra_checks import find_card_fault, require_declarations
from shoal.core.local.device import TrainingSetup
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Tree
from shoal.core.task import JobResult, Task, TaskResult
from shoal.core.types import SERVER, Job, Outcome
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.remote.messages import (
    REPLY_SLACK_BYTES,
    RequestStamp,
    TrainRequest,
    decode_reply_bytes,
    read_enrolment_bytes,
)
from shoal.remote.tree_bytes import tree_to_bytes
from shoal.storage.memory import DeviceMemory

log = logging.getLogger("shoal")
MEMORY_ROUND_KEY = ".since"
"""Under this name the server stores the round of a device's memory; the memory itself stays on the device."""
MAX_CLAIMED_SAMPLES = 10**8
"""The most samples that a device may claim to have."""


class Transport(Protocol):
    """Carries requests to devices and brings back their replies."""

    def exchange(
        self, requests: Mapping[int, bytes], kind: str, timeout: float, /
    ) -> Iterator[tuple[int, bytes | str]]:
        """For each device exactly once, as they come in: its reply, or in words why there is none.

        `kind` is "enrol", "train" or "judge"; `timeout` is in seconds.
        """
        ...


class RemoteEngine:
    """Lets real devices train; the server's own tasks are trained in this process.

    Devices have `reply_timeout` seconds to answer, and no tensor of a reply may have a norm above `max_norm`.
    """

    def __init__(
        self, transport: Transport, run_id: str, run_description: dict[str, Any], reply_timeout: float, max_norm: float
    ):
        self.transport, self.run_id, self.run_description, self.reply_timeout, self.max_norm = (
            transport,
            run_id,
            run_description,
            reply_timeout,
            max_norm,
        )
        self.cuts: tuple[Plan, ...] = ()
        self.server_engine = SerialEngine()

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        remote_tasks = [task for task in tasks if task.job.device != SERVER]
        requests = {task.job.device: self.build_request(task) for task in remote_tasks}
        replies = (
            self.collect_replies({d: request.to_bytes() for d, request in requests.items()}, "train")
            if remote_tasks
            else {}
        )
        training_setups = {task.job.device: task.setup for task in remote_tasks}
        results = {d: self.read_reply(replies[d], request, training_setups[d]) for d, request in requests.items()}
        for device, (outcome, _) in results.items():
            if outcome.problem:
                log.warning("device %d, round %d: %s", device, requests[device].job.round, outcome.problem)
        return [results[t.job.device] if t.job.device in results else self.server_engine.train([t])[0] for t in tasks]

    def build_request(self, task: Task) -> TrainRequest:
        job, memory_version = task.job, read_memory_version(task.memory)
        stamp = RequestStamp(self.run_id, job.round, job.device, token_hex(8))
        return TrainRequest(stamp, self.run_description, job, self.cuts, memory_version, self.reply_timeout)

    def read_reply(self, reply: bytes | str, request: TrainRequest, training_setup: TrainingSetup) -> TaskResult:
        """The outcome that a reply tells; as memory of the device, the version (round, cuts) that it has stored."""
        job: Job = request.job
        if isinstance(reply, str):
            return TaskResult(Outcome(job.device, problem=reply), {})
        try:
            has_codecs = bool(training_setup.method.codecs_for("up"))
            outcome, remembers = decode_reply_bytes(
                reply, request.stamp, job, training_setup.net, has_codecs, self.max_norm
            )
        except ShoalError as error:
            return TaskResult(Outcome(job.device, problem=error.problem), {})
        version = {"round": torch.tensor(job.round), "cuts": torch.tensor(len(request.cuts))}
        return TaskResult(outcome, {MEMORY_ROUND_KEY: version} if remembers else {})

    def collect_replies(self, requests: Mapping[int, bytes], kind: str) -> dict[int, bytes | str]:
        return dict(self.transport.exchange(requests, kind, self.reply_timeout))

    def enrol_devices(
        self, devices: Sequence[int], max_bytes: int, find_fault: Callable[[dict[str, Tensor]], str]
    ) -> dict[int, tuple[int, dict[str, Tensor]]]:
        """Number of samples and enrolment card of each device; devices whose reply is refused are left out.

        So are those whose card has a fault.
        """
        stamps = {d: RequestStamp(self.run_id, -1, d, token_hex(8)) for d in devices}
        requests = {d: tree_to_bytes({"stamp": s.to_dict(), "setup": self.run_description}) for d, s in stamps.items()}
        enrolments = {}
        for device, reply in self.collect_replies(requests, "enrol").items():
            try:
                if isinstance(reply, str):
                    raise ShoalError("damaged", reply, "It was not used.")
                size, card = read_enrolment_bytes(reply, stamps[device], max_bytes, MAX_CLAIMED_SAMPLES)
                if fault := find_fault(card):
                    raise ShoalError("damaged", fault, "It was not used.")
                enrolments[device] = size, card
            except ShoalError as error:
                log.warning("device %d, enrolment: %s", device, error.problem)
        return enrolments

    def close(self) -> None:
        pass


class RemoteDevices(LocalDevices):
    """The devices of one run, on machines of their own; refused for a part that does not declare its extras."""

    is_untrusted = True

    def __init__(self, setup: TrainingSetup, memory: DeviceMemory, remote_engine: RemoteEngine):
        require_declarations(setup.method, setup.net)
        super().__init__(setup, memory, remote_engine)
        self.remote_engine = remote_engine
        self.enrolment_cards: dict[int, dict[str, Tensor]] = {}
        """What parts learn from each device at its enrolment."""
        self.answered: tuple[int, ...] = ()
        """The devices that trained in the newest round."""

    def make_tasks(self, jobs: Sequence[Job]) -> list[Task]:
        server_tasks = iter(super().make_tasks([job for job in jobs if job.device == SERVER]))
        make_remote_task = lambda job: Task(self.setup, job, self.memory.get(job.device))  # noqa: E731
        return [next(server_tasks) if job.device == SERVER else make_remote_task(job) for job in jobs]

    def store_results(self, results: Sequence[JobResult]) -> list[Outcome]:
        super().store_results([result for result in results if result.job.device == SERVER])
        trained = [r for r in results if r.outcome.message is not None and r.job.device != SERVER]
        self.answered = tuple(result.job.device for result in trained)
        for job, _, memory in trained:
            self.memory.put(job.device, memory)
        return [result.outcome for result in results]

    def find_memory_version(self, device: int) -> tuple[int, int] | None:
        """The version of a device's memory once the round that is under way is committed."""
        return read_memory_version(self.memory.get_newest(device))

    def ask_sample_counts(self, devices: Sequence[int]) -> dict[int, int]:
        """The number of samples of each device that could be reached."""
        max_bytes = tree.count_tree_bytes(self.setup.net.initial) + REPLY_SLACK_BYTES
        find_fault = lambda card: find_card_fault(self.setup.method, card, self.setup.net)  # noqa: E731
        enrolments = self.remote_engine.enrol_devices(devices, max_bytes, find_fault)
        self.enrolment_cards |= {device: card for device, (_, card) in enrolments.items()}
        return {device: size for device, (size, _) in enrolments.items()}

    def enrol(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """The enrolment cards of those devices that sent one."""
        missing = [d for d in devices if d not in self.enrolment_cards]
        if missing:
            self.ask_sample_counts(missing)
        return {d: self.enrolment_cards[d] for d in devices if d in self.enrolment_cards}

    def resize(self, net: Net, plan: Plan) -> None:
        super().resize(net, plan)
        self.remote_engine.cuts = (*self.remote_engine.cuts, plan)


def read_memory_version(memory: dict[str, Tree]) -> tuple[int, int] | None:
    """The version (round, number of cuts) that the server has noted of a device's memory; None where it has none."""
    version = memory.get(MEMORY_ROUND_KEY)
    return None if version is None else (int(version["round"]), int(version["cuts"]))
