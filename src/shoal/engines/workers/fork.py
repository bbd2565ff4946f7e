"""All cores of one machine: worker processes, forks of this one, train chunks of a round's devices.

A fork inherits the sites with their data, model and parts, so nothing of them is ever sent; what is sent goes through
arenas. Chunks are cut in this process and handed out longest first, and who trains one changes nothing about it.
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
from shoal.engines.base import Task, TaskResult, TrainingEngine, estimate_steps
from shoal.engines.workers.chunking import split_into_chunks
from shoal.engines.workers.fork_worker import WorkerFailure, detach_from_parent, flush_stream, serve_chunks
from shoal.engines.workers.shared_memory import SharedBuffer

MAX_CHUNK_DEATHS = 3
"""So many workers may die of a chunk before it is given up."""


class PoolEngine:
    """Trains chunks of at most `width` devices in so many worker processes, each with a crew of its own."""

    def __init__(self, workers: int, width: int, inner: Callable[[], TrainingEngine]):
        self.width, self.inner = width, inner
        self.numbers: WeakKeyDictionary[TrainingSetup, int] = WeakKeyDictionary()
        """The sites that the workers know, and what each is called on the way."""
        self.unused = count()
        self.workers = [ForkWorker() for _ in range(workers)]
        finalize(self, terminate_workers, self.workers, os.getpid())

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        self.register_setups(dict.fromkeys(task.setup for task in tasks))
        shift = ForkScheduler(self, tasks)
        try:
            shift.run_chunks()
        except BaseException:
            self.close()  # a message may have been cut off in the middle
            raise
        if shift.failed:
            raise shift.failed[min(shift.failed)]
        return [shift.done[i] for i in range(len(tasks))]

    def close(self) -> None:
        """End the workers; another `train` starts new ones."""
        terminate_workers(self.workers, os.getpid())

    def register_setups(self, sites: Iterable[TrainingSetup]) -> None:
        """Workers know the sites that were there when they were forked; for a new one they are forked anew."""
        new = [site for site in sites if site not in self.numbers]
        for site in new:
            if site.net.place.type != "cpu":
                problem = f"Worker processes cannot train on {site.net.place}."
                raise ShoalError("no-device", problem, "Use --engine batched.")
        if new:
            self.close()
            self.numbers.update(zip(new, self.unused))

    def start_worker(self, worker: "ForkWorker") -> None:
        worker.start({number: site for site, number in self.numbers.items()}, self.inner)


class ForkWorker:
    """One process, the pipe to it, and the memory shared with it; after a death the next one takes its place."""

    def __init__(self):
        self.process = 0
        self.pipe: Connection | None = None
        self.arenas: list[SharedBuffer] = []
        """One for orders, and two that answers go into by turns: one is read while the next is made."""
        self.turn = 0
        self.chunk: int | None = None
        """The number of the chunk that is being trained."""

    def start(self, sites: dict[int, TrainingSetup], inner: Callable[[], TrainingEngine]) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            problem = "Worker processes are forks of this one, and this system cannot fork safely."
            raise ShoalError("no-device", problem, "Use --engine batched.")
        for stream in (sys.stdout, sys.stderr):
            flush_stream(stream)
        self.turn, parent = 0, os.getpid()
        try:
            self.arenas = self.arenas or [SharedBuffer() for _ in range(3)]
            self.pipe, far = Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a worker needs none of this process
                self.process = os.fork()
        except OSError as error:
            problem = f"A worker process could not be started ({describe_error(error)})."
            raise ShoalError("no-device", problem, "Use fewer workers or --engine batched.") from error
        if not self.process:
            try:
                detach_from_parent(far.fileno(), parent, {arena.file for arena in self.arenas})
                serve_chunks(far, self.arenas, sites, inner)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        far.close()

    def send_chunk(self, number: int, tasks: list[tuple]) -> None:
        assert self.pipe
        self.chunk, self.turn = number, 1 - self.turn
        self.pipe.send_bytes(self.arenas[0].write_object(tasks))

    def terminate(self) -> str:
        """Make sure that the process is gone; what it ended with."""
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
    """One call of `train`: what waits, what is done, what failed."""

    def __init__(self, pool: PoolEngine, tasks: Sequence[Task]):
        self.pool, self.tasks = pool, tasks
        self.chunks = split_into_chunks([estimate_steps(task) for task in tasks], pool.width, len(pool.workers))
        self.waiting = deque(range(len(self.chunks)))
        self.deaths = Counter[int]()
        self.done: dict[int, TaskResult] = {}
        self.failed: dict[int, BaseException] = {}

    def run_chunks(self) -> None:
        """Until all is done or, after a failure, until everybody is idle.

        Chunks are begun in order: the first of those that fail is the same whichever answer comes first.
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
        """Give an idle worker something to do, if there is anything."""
        if self.failed or not self.waiting:
            return
        number = self.waiting.popleft()
        own = [self.tasks[i] for i in self.chunks[number]]
        if not worker.pipe:
            self.pool.start_worker(worker)
        try:
            worker.send_chunk(number, [(self.pool.numbers[task.setup], task.job, task.memory) for task in own])
        except ConnectionError:
            self.handle_worker_death(worker)

    def receive_result(self, worker: ForkWorker) -> None:
        """Take an answer, after its worker has been given something new."""
        assert worker.pipe and worker.chunk is not None
        try:
            answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self.handle_worker_death(worker)
        number, arena, worker.chunk = worker.chunk, worker.arenas[1 + worker.turn], None
        self.assign_chunk(worker)
        found = arena.read_object(answer, copy=True)
        if isinstance(found, WorkerFailure):
            self.failed[number] = found.error
        else:
            self.done.update(zip(self.chunks[number], found, strict=True))

    def handle_worker_death(self, worker: ForkWorker) -> None:
        """A worker died: its chunk is trained anew."""
        assert worker.chunk is not None
        number, cause = worker.chunk, worker.terminate()
        self.deaths[number] += 1
        if self.deaths[number] < MAX_CHUNK_DEATHS:
            self.waiting.appendleft(number)
            return
        devices = ", ".join(str(self.tasks[i].job.device) for i in self.chunks[number])
        problem = (
            f"{MAX_CHUNK_DEATHS} worker processes died while they trained the devices {devices}, the last with {cause}."
        )
        advice = "If memory ran out, use fewer workers or smaller batches; --engine serial shows what else it may be."
        self.failed[number] = ShoalError("bug", problem, advice)


def terminate_workers(workers: Sequence[ForkWorker], owner: int) -> None:
    """Workers are ended by the process that forked them and by nobody else."""
    if os.getpid() == owner:
        for worker in workers:
            worker.terminate()


def reap_process(process: int) -> int:
    """The exit code of a child, or minus the signal that it died of; if it is still alive, it is killed."""
    try:
        found, status = os.waitpid(process, os.WNOHANG)
        if not found:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
    except ChildProcessError:  # somebody else took note of its end
        return 0
    return os.waitstatus_to_exitcode(status)
