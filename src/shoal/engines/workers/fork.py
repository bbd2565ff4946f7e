"""The engine `pool`: worker processes, forked from this one, train chunks of a round's devices on all cores.

A fork inherits the training setups with their data, model and parts, so they are never sent; tasks and results go
through shared memory. The longest chunks are handed out first; results do not depend on which worker trains a chunk.
"""

import os
import signal
import sys
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from weakref import WeakKeyDictionary, finalize

from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.device import TrainingSetup
from shoal.core.task import Engine, Task, TaskResult, estimate_steps
from shoal.engines.workers.chunking import split_into_chunks
from shoal.engines.workers.fork_worker import WorkerFailure, detach_from_parent, flush_stream, serve_chunks
from shoal.engines.workers.shared_memory import SharedBuffer

MAX_CHUNK_DEATHS = 3
"""A chunk is given up when this many workers have died while they trained it."""


class PoolEngine:
    """Trains chunks of at most `width` devices in worker processes, each with the engine that `make_engine` builds."""

    def __init__(self, workers: int, width: int, make_engine: Callable[[], Engine]):
        self.width, self.make_engine = width, make_engine
        self.setup_numbers: WeakKeyDictionary[TrainingSetup, int] = WeakKeyDictionary()
        """The training setups that the workers have, and the number that stands for each of them in a message."""
        self.free_numbers = count()
        self.workers = [ForkWorker() for _ in range(workers)]
        finalize(self, terminate_workers, self.workers, os.getpid())

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        self.register_setups(dict.fromkeys(task.setup for task in tasks))
        scheduler = ForkScheduler(self, tasks)
        try:
            scheduler.run_chunks()
        except BaseException:
            self.close()  # a message may have been cut off in the middle
            raise
        if scheduler.failures:
            raise scheduler.failures[min(scheduler.failures)]
        return [scheduler.results[i] for i in range(len(tasks))]

    def close(self) -> None:
        """End the workers; another `train` starts new ones."""
        terminate_workers(self.workers, os.getpid())

    def register_setups(self, setups: Iterable[TrainingSetup]) -> None:
        """Number the setups. Workers have those that existed when they were forked; for a new one they are ended."""
        new = [setup for setup in setups if setup not in self.setup_numbers]
        for setup in new:
            if setup.net.place.type != "cpu":
                problem = f"Worker processes cannot train on {setup.net.place}."
                raise ShoalError("no-device", problem, "Use --engine batched.")
        if new:
            self.close()
            self.setup_numbers.update(zip(new, self.free_numbers))

    def start_worker(self, worker: "ForkWorker") -> None:
        worker.start({number: setup for setup, number in self.setup_numbers.items()}, self.make_engine)


class ForkWorker:
    """One process, the pipe to it, and the memory shared with it; after its death it can be started again."""

    def __init__(self):
        self.process = 0
        self.pipe: Connection | None = None
        self.buffers: list[SharedBuffer] = []
        """One for tasks, and two for results, used by turns: one is read while the other is written."""
        self.reply_index = 0
        self.chunk: int | None = None
        """The number of the chunk that it trains; None where it is idle."""

    def start(self, setups: dict[int, TrainingSetup], make_engine: Callable[[], Engine]) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            problem = "Worker processes are forks of this one, and this system cannot fork safely."
            raise ShoalError("no-device", problem, "Use --engine batched.")
        for stream in (sys.stdout, sys.stderr):
            flush_stream(stream)
        self.reply_index, parent = 0, os.getpid()
        try:
            self.buffers = self.buffers or [SharedBuffer() for _ in range(3)]
            self.pipe, far_end = Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a worker needs none of this process
                self.process = os.fork()
        except OSError as error:
            problem = f"A worker process could not be started ({describe_error(error)})."
            raise ShoalError("no-device", problem, "Use fewer workers or --engine batched.") from error
        if not self.process:
            try:
                detach_from_parent(far_end.fileno(), parent, {buffer.file for buffer in self.buffers})
                serve_chunks(far_end, self.buffers, setups, make_engine)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        far_end.close()

    def send_chunk(self, number: int, tasks: list[tuple]) -> None:
        assert self.pipe
        self.chunk, self.reply_index = number, 1 - self.reply_index
        self.pipe.send_bytes(self.buffers[0].write_object(tasks))

    def terminate(self) -> str:
        """End the process; what it ended with, in words."""
        self.chunk = None
        if self.pipe:
            self.pipe.close()
            self.pipe = None
        process, self.process = self.process, 0
        if not process:
            return ""
        code = reap_process(process)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class ForkScheduler:
    """One call of `train`: hands chunks to workers, collects results, and replaces workers that die."""

    def __init__(self, pool: PoolEngine, tasks: Sequence[Task]):
        self.pool, self.tasks = pool, tasks
        self.chunks = split_into_chunks([estimate_steps(task) for task in tasks], pool.width, len(pool.workers))
        self.queue = deque(range(len(self.chunks)))
        self.deaths = Counter[int]()
        self.results: dict[int, TaskResult] = {}
        self.failures: dict[int, BaseException] = {}

    def run_chunks(self) -> None:
        """Run until all chunks are done or, after a failure, until every worker is idle.

        Chunks are begun in order, so the first one that fails does not depend on which reply comes first.
        """
        workers = self.pool.workers
        while True:
            for worker in workers:
                if worker.chunk is None:
                    self.assign_chunk(worker)
            busy = [worker for worker in workers if worker.chunk is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy if worker.pipe])
            for worker in busy:
                if worker.pipe in ready:
                    self.receive_result(worker)

    def assign_chunk(self, worker: ForkWorker) -> None:
        """Send the next chunk to an idle worker, if there is one; the process is started where there is none."""
        if self.failures or not self.queue:
            return
        number = self.queue.popleft()
        tasks = [self.tasks[i] for i in self.chunks[number]]
        if not worker.pipe:
            self.pool.start_worker(worker)
        try:
            worker.send_chunk(number, [(self.pool.setup_numbers[task.setup], task.job, task.memory) for task in tasks])
        except ConnectionError:
            self.handle_worker_death(worker)

    def receive_result(self, worker: ForkWorker) -> None:
        """Store the result of a worker, after it has been sent its next chunk."""
        assert worker.pipe and worker.chunk is not None
        try:
            reply = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self.handle_worker_death(worker)
        number, buffer, worker.chunk = worker.chunk, worker.buffers[1 + worker.reply_index], None
        self.assign_chunk(worker)
        result = buffer.read_object(reply, copy=True)
        if isinstance(result, WorkerFailure):
            self.failures[number] = result.error
        else:
            self.results.update(zip(self.chunks[number], result, strict=True))

    def handle_worker_death(self, worker: ForkWorker) -> None:
        """Put the chunk of a dead worker back to the front of the queue, or give it up after too many deaths."""
        assert worker.chunk is not None
        number, cause = worker.chunk, worker.terminate()
        self.deaths[number] += 1
        if self.deaths[number] < MAX_CHUNK_DEATHS:
            self.queue.appendleft(number)
            return
        devices = ", ".join(str(self.tasks[i].job.device) for i in self.chunks[number])
        problem = (
            f"{MAX_CHUNK_DEATHS} worker processes died while they trained the devices {devices}, the last with {cause}."
        )
        advice = "If memory ran out, use fewer workers or smaller batches; --engine serial shows what else it may be."
        self.failures[number] = ShoalError("bug", problem, advice)


def terminate_workers(workers: Sequence[ForkWorker], owner: int) -> None:
    """End the workers, in the process that forked them (`owner`); in a fork of it do nothing."""
    if os.getpid() == owner:
        for worker in workers:
            worker.terminate()


def reap_process(process: int) -> int:
    """The exit code of a child, or minus the signal that it died of; if it is still alive, it is killed."""
    try:
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
    except ChildProcessError:  # somebody else took note of its end
        return 0
    return os.waitstatus_to_exitcode(status)
