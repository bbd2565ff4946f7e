"""The scheduler of workers, with workers that are only played: who is to blame, and which failure is raised."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.errors import ShoalError
from shoal.engines.workers.scheduler import ChunkScheduler, WorkerDeath, WorkerFailure, WorkerPolicy

Answer = Callable[[list[int]], Any]


class PlayedWorker:
    def __init__(self):
        self.pending: deque[list[int]] = deque()
        self.requests: deque[list[int]] = deque()


class PlayedTransport:
    """Workers that answer at once, the last one first; `answer` says what becomes of a chunk of devices."""

    def __init__(self, workers: int, answer: Answer):
        self.workers, self.answer = [PlayedWorker() for _ in range(workers)], answer
        self.log: list[list[int]] = []
        """The chunks that were answered, or that a worker died of."""
        self.most_pending, self.now = 0, 0.0

    def is_ready(self, worker: PlayedWorker) -> bool:
        return True

    def send_chunk(self, worker: PlayedWorker, tasks: list) -> None:
        worker.requests.append([task.job.device for task in tasks])
        self.most_pending = max(self.most_pending, len(worker.requests))

    def wait(self, seconds: float) -> list[PlayedWorker]:
        answered = [worker for worker in self.workers if worker.requests and self.answer(worker.requests[0]) != "hangs"]
        self.now += 0 if answered else seconds
        return answered[-1:]

    def receive_reply(self, worker: PlayedWorker) -> Any:
        self.log.append(worker.requests[0])
        reply = self.answer(worker.requests[0])
        if not isinstance(reply, WorkerDeath):
            worker.requests.popleft()
        return reply

    def decode_reply(self, reply: Any) -> Any:
        return reply

    def replace_worker(self, worker: PlayedWorker) -> list:
        worker.requests.clear()
        return []


def schedule(chunks: list[list[int]], transport: PlayedTransport, policy: WorkerPolicy) -> list:
    tasks: Any = [
        SimpleNamespace(job=SimpleNamespace(device=i), memory={"of": i}) for i in range(sum(map(len, chunks)))
    ]
    scheduler = ChunkScheduler(tasks, chunks, transport, policy)
    scheduler.run_chunks()
    return scheduler.get_results()


ENDS_RUN = WorkerPolicy(max_deaths=3, drops_devices=False)
DROPS = WorkerPolicy(max_deaths=2, drops_devices=True, max_pending=2)


@pytest.mark.parametrize("policy", [ENDS_RUN, DROPS])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(policy, workers):
    transport = PlayedTransport(workers, lambda devices: devices)
    assert schedule([[4, 1], [0, 5], [2], [3]], transport, policy) == [0, 1, 2, 3, 4, 5]
    assert transport.most_pending <= policy.max_pending


def test_the_first_chunk_that_fails_is_raised_whoever_answers_first():
    transport = PlayedTransport(2, lambda devices: WorkerFailure(LookupError(f"of {devices}")))
    with pytest.raises(LookupError, match=r"of \[2, 0\]"):
        schedule([[2, 0], [1], [3], [4]], transport, ENDS_RUN)
    assert transport.log == [[1], [3], [2, 0]], "a worker has its next chunk before its reply is read, and no other"


def test_a_chunk_that_costs_three_workers_ends_the_run():
    transport = PlayedTransport(1, lambda devices: WorkerDeath("SIGKILL") if 1 in devices else devices)
    with pytest.raises(ShoalError, match="3 worker processes died while they trained the devices 1, 2, .* SIGKILL"):
        schedule([[0], [1, 2], [3]], transport, ENDS_RUN)
    assert transport.log == [[0], *3 * [[1, 2]]]


def test_a_device_that_costs_two_workers_drops_out_and_the_others_do_not(caplog):
    transport = PlayedTransport(1, lambda devices: WorkerDeath("died (so)") if 1 in devices else devices)
    first, dropped, *others = schedule([[0, 1, 2], [3], [4], [5]], transport, DROPS)
    assert [first, *others] == [0, 2, 3, 4, 5] and dropped.memory == {"of": 1}
    assert dropped.outcome.problem == "2 workers were lost with it; the last died (so)"
    assert transport.log[:4] == [[0, 1, 2], [0], [1], [2]], "each device is tried by itself"
    assert "trained the devices 0, 1, 2 died (so)" in caplog.text


def test_a_worker_that_hangs_is_replaced_after_its_deadline(monkeypatch):
    transport = PlayedTransport(1, lambda devices: "hangs" if devices == [0, 1] else devices)
    monkeypatch.setattr("shoal.engines.workers.scheduler.monotonic", lambda: transport.now)
    policy = WorkerPolicy(max_deaths=2, drops_devices=True, seconds_per_device=30.0)
    assert schedule([[0, 1], [2]], transport, policy) == [0, 1, 2]
    assert transport.log == [[0], [1], [2]] and transport.now == 60.0
