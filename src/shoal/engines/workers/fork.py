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
from shoal.engines.base import Crew, Done, Task
from shoal.engines.batched.engine import expected
from shoal.engines.workers.chunking import chunked
from shoal.engines.workers.fork_worker import Failure, flush, serve, settle
from shoal.engines.workers.shared_memory import Arena

DEATHS = 3
"""So many workers may die of a chunk before it is given up."""


class Pool:
    """Trains chunks of at most `width` devices in so many worker processes, each with a crew of its own."""

    def __init__(self, workers: int, width: int, inner: Callable[[], Crew]):
        self.width, self.inner = width, inner
        self.numbers: WeakKeyDictionary[TrainingSetup, int] = WeakKeyDictionary()
        """The sites that the workers know, and what each is called on the way."""
        self.unused = count()
        self.workers = [Worker() for _ in range(workers)]
        finalize(self, end_all, self.workers, os.getpid())

    def train(self, tasks: Sequence[Task]) -> list[Done]:
        self.meet(dict.fromkeys(task.site for task in tasks))
        shift = Shift(self, tasks)
        try:
            shift.work()
        except BaseException:
            self.close()  # a message may have been cut off in the middle
            raise
        if shift.failed:
            raise shift.failed[min(shift.failed)]
        return [shift.done[i] for i in range(len(tasks))]

    def close(self) -> None:
        """End the workers; another `train` starts new ones."""
        end_all(self.workers, os.getpid())

    def meet(self, sites: Iterable[TrainingSetup]) -> None:
        """Workers know the sites that were there when they were forked; for a new one they are forked anew."""
        new = [site for site in sites if site not in self.numbers]
        for site in new:
            if site.net.place.type != "cpu":
                problem = f"Worker processes cannot train on {site.net.place}."
                raise ShoalError("no-device", problem, "Use --engine batched.")
        if new:
            self.close()
            self.numbers.update(zip(new, self.unused))

    def start(self, worker: "Worker") -> None:
        worker.start({number: site for site, number in self.numbers.items()}, self.inner)


class Worker:
    """One process, the pipe to it, and the memory shared with it; after a death the next one takes its place."""

    def __init__(self):
        self.process = 0
        self.pipe: Connection | None = None
        self.arenas: list[Arena] = []
        """One for orders, and two that answers go into by turns: one is read while the next is made."""
        self.turn = 0
        self.chunk: int | None = None
        """The number of the chunk that is being trained."""

    def start(self, sites: dict[int, TrainingSetup], inner: Callable[[], Crew]) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            problem = "Worker processes are forks of this one, and this system cannot fork safely."
            raise ShoalError("no-device", problem, "Use --engine batched.")
        for stream in (sys.stdout, sys.stderr):
            flush(stream)
        self.turn, parent = 0, os.getpid()
        try:
            self.arenas = self.arenas or [Arena() for _ in range(3)]
            self.pipe, far = Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a worker needs none of this process
                self.process = os.fork()
        except OSError as error:
            problem = f"A worker process could not be started ({describe_error(error)})."
            raise ShoalError("no-device", problem, "Use fewer workers or --engine batched.") from error
        if not self.process:
            try:
                settle(far.fileno(), parent, {arena.file for arena in self.arenas})
                serve(far, self.arenas, sites, inner)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        far.close()

    def give(self, number: int, tasks: list[tuple]) -> None:
        assert self.pipe
        self.chunk, self.turn = number, 1 - self.turn
        self.pipe.send_bytes(self.arenas[0].write(tasks))

    def end(self) -> str:
        """Make sure that the process is gone; what it ended with."""
        self.chunk = None
        if self.pipe:
            self.pipe.close()
            self.pipe = None
        process, self.process = self.process, 0
        if not process:
            return ""
        code = ended(process)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class Shift:
    """One call of `train`: what waits, what is done, what failed."""

    def __init__(self, pool: Pool, tasks: Sequence[Task]):
        self.pool, self.tasks = pool, tasks
        self.chunks = chunked([expected(task) for task in tasks], pool.width, len(pool.workers))
        self.waiting = deque(range(len(self.chunks)))
        self.deaths = Counter[int]()
        self.done: dict[int, Done] = {}
        self.failed: dict[int, BaseException] = {}

    def work(self) -> None:
        """Until all is done or, after a failure, until everybody is idle.

        Chunks are begun in order: the first of those that fail is the same whichever answer comes first.
        """
        workers = self.pool.workers
        while True:
            for worker in workers:
                if worker.chunk is None:
                    self.occupy(worker)
            busy = [worker for worker in workers if worker.chunk is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy if worker.pipe])
            for worker in busy:
                if worker.pipe in ready:
                    self.hear(worker)

    def occupy(self, worker: Worker) -> None:
        """Give an idle worker something to do, if there is anything."""
        if self.failed or not self.waiting:
            return
        number = self.waiting.popleft()
        own = [self.tasks[i] for i in self.chunks[number]]
        if not worker.pipe:
            self.pool.start(worker)
        try:
            worker.give(number, [(self.pool.numbers[task.site], task.job, task.memory) for task in own])
        except ConnectionError:
            self.bury(worker)

    def hear(self, worker: Worker) -> None:
        """Take an answer, after its worker has been given something new."""
        assert worker.pipe and worker.chunk is not None
        try:
            answer = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return self.bury(worker)
        number, arena, worker.chunk = worker.chunk, worker.arenas[1 + worker.turn], None
        self.occupy(worker)
        found = arena.read(answer, copy=True)
        if isinstance(found, Failure):
            self.failed[number] = found.error
        else:
            self.done.update(zip(self.chunks[number], found, strict=True))

    def bury(self, worker: Worker) -> None:
        """A worker died: its chunk is trained anew."""
        assert worker.chunk is not None
        number, cause = worker.chunk, worker.end()
        self.deaths[number] += 1
        if self.deaths[number] < DEATHS:
            self.waiting.appendleft(number)
            return
        devices = ", ".join(str(self.tasks[i].job.device) for i in self.chunks[number])
        problem = f"{DEATHS} worker processes died while they trained the devices {devices}, the last with {cause}."
        advice = "If memory ran out, use fewer workers or smaller batches; --engine serial shows what else it may be."
        self.failed[number] = ShoalError("bug", problem, advice)


def end_all(workers: Sequence[Worker], owner: int) -> None:
    """Workers are ended by the process that forked them and by nobody else."""
    if os.getpid() == owner:
        for worker in workers:
            worker.end()


def ended(process: int) -> int:
    """The exit code of a child, or minus the signal that it died of; if it is still alive, it is killed."""
    try:
        found, status = os.waitpid(process, os.WNOHANG)
        if not found:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
    except ChildProcessError:  # somebody else took note of its end
        return 0
    return os.waitstatus_to_exitcode(status)
