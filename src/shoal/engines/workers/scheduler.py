"""The scheduler of all engines with workers: it hands out chunks of tasks, collects results and replaces lost workers.

A transport (`fork`, `ray_transport`) moves chunks and replies; a policy says what the loss of a worker means. Every
task ends in one way: with a result, with an exception that the engine raises, or as a device that drops out of the
round. Chunks are begun in order, and the first that failed is raised, whichever worker replied first.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from shoal.core.errors import ShoalError
from shoal.core.task import Task, TaskResult
from shoal.core.types import Outcome

log = logging.getLogger("shoal")


class WorkerFailure(NamedTuple):
    """An exception in training, which a worker sends instead of results."""

    error: BaseException


class WorkerDeath(NamedTuple):
    """Why a worker sends nothing any more, in words."""

    cause: str


class Worker(Protocol):
    """A process that trains one chunk after the other."""

    pending: deque[list[int]]
    """The task numbers of the chunks that it was sent and has not answered, the oldest first."""


WorkerType = TypeVar("WorkerType", bound=Worker)


class WorkerTransport(Protocol[WorkerType]):
    """How chunks get to workers, and replies back, in one call of `train`."""

    @property
    def workers(self) -> Sequence[WorkerType]: ...

    def is_ready(self, worker: WorkerType) -> bool:
        """Whether a worker can be sent a chunk."""
        ...

    def send_chunk(self, worker: WorkerType, tasks: list[Task]) -> None: ...

    def wait(self, seconds: float) -> list[WorkerType]:
        """The workers that answered their oldest chunk, or died; after so many seconds perhaps none."""
        ...

    def receive_reply(self, worker: WorkerType) -> Any | WorkerDeath:
        """The answer to a worker's oldest chunk, not decoded yet: the worker can be sent its next chunk first."""
        ...

    def decode_reply(self, reply: Any) -> list[TaskResult] | WorkerFailure: ...

    def replace_worker(self, worker: WorkerType) -> list[Any]:
        """End a worker and let another take its place; the replies that it left behind, the oldest first."""
        ...


@dataclass(frozen=True)
class WorkerPolicy:
    """What happens to tasks whose worker is lost, and how many chunks a worker has at a time."""

    max_deaths: int
    """A task is given up when this many workers were lost with it."""
    drops_devices: bool
    """Whether a task that is given up costs its device the round, after it was tried alone; else the run ends."""
    seconds_per_device: float = inf
    """A worker that takes longer for a chunk is taken for hung."""
    max_pending: int = 1
    """Chunks that a worker may have: one that it trains, and others that wait there."""


class ChunkScheduler(Generic[WorkerType]):
    """One call of an engine's `train`; `chunks` are task numbers in the order in which they are begun."""

    def __init__(
        self,
        tasks: Sequence[Task],
        chunks: Iterable[list[int]],
        transport: WorkerTransport[WorkerType],
        policy: WorkerPolicy,
    ):
        self.tasks, self.transport, self.policy = tasks, transport, policy
        self.queue = deque(chunks)
        self.rank = {i: place for place, i in enumerate(chain.from_iterable(self.queue))}
        self.deadlines: dict[WorkerType, float] = {}
        self.deaths = Counter[int]()
        self.results: dict[int, TaskResult] = {}
        self.failures: dict[int, BaseException] = {}

    def run_chunks(self) -> None:
        """Run until every task has its end or, after a failure, until every worker is idle."""
        workers = self.transport.workers
        while self.queue or any(worker.pending for worker in workers):
            self.assign_chunks()
            for worker in self.transport.wait(min(self.deadlines.values(), default=inf) - monotonic()):
                self.receive_reply(worker)
            for worker in workers:
                if self.deadlines.get(worker, inf) <= monotonic():
                    seconds = self.policy.seconds_per_device
                    self.handle_death(worker, f"did not end within {seconds:g} s for each device")

    def get_results(self) -> list[TaskResult]:
        """The results in the order of the tasks; where chunks failed, the exception of the first of them is raised."""
        if self.failures:
            raise self.failures[min(self.failures)]
        return [self.results[i] for i in range(len(self.tasks))]

    def assign_chunks(self) -> None:
        """Send one chunk to every idle worker, then more to wait there, if there are enough for all.

        A task that a worker was lost with is sent alone: if the next worker is lost too, that task is to blame.
        """
        workers = [worker for worker in self.transport.workers if self.transport.is_ready(worker)]
        for limit in range(1, self.policy.max_pending + 1):
            if limit > 1 and len(self.queue) < len(self.transport.workers):
                return
            for worker in workers:
                if self.queue and len(worker.pending) < limit:
                    nearby = chain(self.queue[0], *worker.pending)
                    if limit == 1 or not any(self.deaths[i] for i in nearby):
                        chunk = self.queue.popleft()
                        self.transport.send_chunk(worker, [self.tasks[i] for i in chunk])
                        worker.pending.append(chunk)
                        self.deadlines.setdefault(worker, self.compute_deadline(worker))

    def compute_deadline(self, worker: WorkerType) -> float:
        """When a worker that begins its oldest chunk now must have answered."""
        return monotonic() + self.policy.seconds_per_device * len(worker.pending[0])

    def receive_reply(self, worker: WorkerType) -> None:
        """Record the reply of a worker, after it was sent its next chunk; or replace a worker that died."""
        reply = self.transport.receive_reply(worker)
        if isinstance(reply, WorkerDeath):
            return self.handle_death(worker, reply.cause)
        chunk = worker.pending.popleft()
        del self.deadlines[worker]
        if worker.pending:
            self.deadlines[worker] = self.compute_deadline(worker)
        self.assign_chunks()
        self.record_reply(chunk, reply)

    def record_reply(self, chunk: list[int], reply: Any) -> None:
        decoded = self.transport.decode_reply(reply)
        if isinstance(decoded, WorkerFailure):
            self.record_failure(chunk, decoded.error)
        else:
            self.results.update(zip(chunk, decoded, strict=True))

    def record_failure(self, chunk: list[int], error: BaseException) -> None:
        """Keep an exception, and begin no further chunk."""
        self.failures[self.rank[chunk[0]]] = error
        self.queue.clear()

    def handle_death(self, worker: WorkerType, cause: str) -> None:
        """Replace a worker that died or hangs; of the chunks that are lost with it, only the first is to blame."""
        chunks = list(worker.pending)
        worker.pending.clear()
        del self.deadlines[worker]
        replies = self.transport.replace_worker(worker)
        for chunk, reply in zip(chunks, replies):
            self.record_reply(chunk, reply)
        lost = chunks[len(replies) :]
        if lost:
            retried = [*self.blame_chunk(lost[0], cause), *lost[1:]]
            self.queue.extendleft([] if self.failures else reversed(retried))

    def blame_chunk(self, chunk: list[int], cause: str) -> list[list[int]]:
        """The chunks in which the tasks of a lost one are tried again; after too many deaths they are given up."""
        devices = ", ".join(str(self.tasks[i].job.device) for i in chunk)
        self.deaths.update(chunk)
        if self.policy.drops_devices:
            log.warning("A worker that trained the devices %s %s.", devices, cause)
            for i in chunk:
                if self.deaths[i] >= self.policy.max_deaths:
                    problem = f"{self.deaths[i]} workers were lost with it; the last {cause}"
                    dropped = Outcome(self.tasks[i].job.device, problem=problem)
                    self.results[i] = TaskResult(dropped, self.tasks[i].memory)
            return [[i] for i in chunk if i not in self.results]
        deaths = self.deaths[chunk[0]]
        if deaths < self.policy.max_deaths:
            return [chunk]
        problem = f"{deaths} worker processes died while they trained the devices {devices}, the last with {cause}."
        advice = "If memory ran out, use fewer workers or smaller batches; --engine serial shows what else it may be."
        self.record_failure(chunk, ShoalError("bug", problem, advice))
        return []
