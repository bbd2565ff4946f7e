"""The engine `pool`: worker processes, forked from this one, train chunks of a round's devices on all cores.

A fork inherits the training setups with their data, model and parts, so they are never sent; tasks and results go
through shared memory. The longest chunks are handed out first; results do not depend on which worker trains a chunk.
"""

import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.device import TrainingSetup
from shoal.core.model import tree
from shoal.core.task import Engine, Task, TaskResult, estimate_steps
from shoal.engines.workers.chunking import split_into_chunks
from shoal.engines.workers.fork_worker import detach_from_parent, flush_stream, serve_chunks
from shoal.engines.workers.scheduler import ChunkScheduler, WorkerDeath, WorkerFailure, WorkerPolicy
from shoal.engines.workers.shared_memory import ReplyBuffer, ReplyState, SharedBuffer

REPLY_BUFFERS = 8
"""How many replies of a worker can be held at once without being copied out of the memory that is shared with it."""
FORK_POLICY = WorkerPolicy(max_deaths=3, drops_devices=False, max_pending=2)
REQUEST_BUFFERS = FORK_POLICY.max_pending


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
        chunks = split_into_chunks([estimate_steps(task) for task in tasks], self.width, len(self.workers))
        scheduler = ChunkScheduler(tasks, chunks, ForkTransport(self), FORK_POLICY)
        try:
            scheduler.run_chunks()
        except BaseException:
            self.close()  # a message may have been cut off in the middle
            raise
        return scheduler.get_results()

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
        self.task_buffers: list[SharedBuffer] = []
        self.reply_buffers: list[ReplyBuffer] = []
        """Several: some are read while another is written."""
        self.unanswered: deque[tuple[int, int]] = deque()
        """The buffers of the tasks that were sent and those of their replies, which have not come; the oldest first."""
        self.pending: deque[list[int]] = deque()

    @property
    def chunk(self) -> list[int] | None:
        """The task numbers of the chunk that it trains; None where it is idle."""
        return self.pending[0] if self.pending else None

    def start(self, setups: dict[int, TrainingSetup], make_engine: Callable[[], Engine]) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            problem = "Worker processes are forks of this one, and this system cannot fork safely."
            raise ShoalError("no-device", problem, "Use --engine batched.")
        for stream in (sys.stdout, sys.stderr):
            flush_stream(stream)
        parent = os.getpid()
        self.unanswered.clear()
        self.drop_replies(ReplyState.ASKED)
        try:
            self.task_buffers = self.task_buffers or [SharedBuffer() for _ in range(REQUEST_BUFFERS)]
            self.reply_buffers = self.reply_buffers or [ReplyBuffer() for _ in range(REPLY_BUFFERS)]
            self.pipe, far_end = Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a worker needs none of this process
                self.process = os.fork()
        except OSError as error:
            problem = f"A worker process could not be started ({describe_error(error)})."
            raise ShoalError("no-device", problem, "Use fewer workers or --engine batched.") from error
        if not self.process:
            try:
                files = {buffer.file for buffer in (*self.task_buffers, *self.reply_buffers)}
                detach_from_parent(far_end.fileno(), parent, files)
                serve_chunks(far_end, self.task_buffers, self.reply_buffers, setups, make_engine)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        far_end.close()

    def send_tasks(self, tasks: list[tuple]) -> None:
        assert self.pipe
        taken = [request for request, _ in self.unanswered]
        request = next(n for n in range(REQUEST_BUFFERS) if n not in taken)
        reply = self.list_free_buffers()[0]
        self.reply_buffers[reply].ask_reply()
        self.unanswered.append((request, reply))
        self.pipe.send_bytes(bytes((request, reply)) + self.task_buffers[request].write_object(tasks))

    def receive_reply(self) -> tuple[int, bytes]:
        """The number of the buffer that the oldest results lie in, and the message about them."""
        assert self.pipe
        message = self.pipe.recv_bytes()
        _, number = self.unanswered.popleft()
        self.reply_buffers[number].accept_reply()
        return number, message

    def read_reply(self, number: int, message: bytes) -> Any:
        """What a reply holds; its tensors are copied where too few other buffers are free for the replies to follow.

        Those that were asked for replies count, since what comes in them can be copied in its turn. At most that many
        are in use at once: one that waits to be read, and those of the chunks that a worker has.
        """
        usable = [buffer for buffer in self.reply_buffers if buffer.state in (ReplyState.FREE, ReplyState.ASKED)]
        return self.reply_buffers[number].read_object(message, copy=len(usable) < 1 + FORK_POLICY.max_pending)

    def list_free_buffers(self) -> list[int]:
        """The numbers of the buffers that the next reply can be written to."""
        return [n for n, buffer in enumerate(self.reply_buffers) if buffer.state is ReplyState.FREE]

    def drop_replies(self, state: ReplyState) -> None:
        """Free the buffers that are in this state."""
        for buffer in self.reply_buffers:
            buffer.drop_reply(state)

    def terminate(self) -> str:
        """End the process; what it ended with, in words."""
        if self.pipe:
            self.pipe.close()
            self.pipe = None
        process, self.process = self.process, 0
        if not process:
            return ""
        code = reap_process(process)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class ForkReply(NamedTuple):
    """A message about results, and where they lie."""

    worker: ForkWorker
    buffer: int
    message: bytes


class ForkTransport:
    """Sends tasks to the workers of a pool, and receives results, through the memory that they share."""

    def __init__(self, pool: PoolEngine):
        self.pool, self.workers = pool, pool.workers

    def is_ready(self, worker: ForkWorker) -> bool:
        return True

    def send_chunk(self, worker: ForkWorker, tasks: list[Task]) -> None:
        """Send tasks; the process is started where there is none, or where it died while it was idle.

        Where it died with tasks of its own, whoever waits for its reply will see that, and all of them are lost.
        """
        content = [(self.pool.setup_numbers[task.setup], task.job, task.memory) for task in tasks]
        try:
            if worker.pipe:
                return worker.send_tasks(content)
        except ConnectionError:
            if worker.pending:
                return
            worker.terminate()
        self.pool.start_worker(worker)
        with suppress(ConnectionError):  # whoever waits for the reply sees that it died
            worker.send_tasks(content)

    def wait(self, seconds: float) -> list[ForkWorker]:
        busy = [worker for worker in self.workers if worker.pending]
        pipes = [worker.pipe for worker in busy if worker.pipe]
        ready = wait(pipes, None if seconds == inf else max(0.0, seconds))
        return [worker for worker in busy if worker.pipe in ready]

    def receive_reply(self, worker: ForkWorker) -> ForkReply | WorkerDeath:
        try:
            return ForkReply(worker, *worker.receive_reply())
        except (EOFError, OSError):
            return WorkerDeath(worker.terminate())

    def decode_reply(self, reply: ForkReply) -> list[TaskResult] | WorkerFailure:
        """The results. Memories of devices are kept for many rounds: they must not hold on to shared memory."""
        results = reply.worker.read_reply(reply.buffer, reply.message)
        if isinstance(results, WorkerFailure):
            return results
        return [result._replace(memory=tree.map_tensors(torch.clone, result.memory)) for result in results]

    def replace_worker(self, worker: ForkWorker) -> list:
        """End a worker; `send_chunk` starts another one."""
        worker.terminate()
        return []


def terminate_workers(workers: Sequence[ForkWorker], owner: int) -> None:
    """End the workers, in the process that forked them (`owner`); in a fork of it do nothing."""
    if os.getpid() == owner:
        for worker in workers:
            worker.terminate()
            worker.pending.clear()
            worker.drop_replies(ReplyState.UNREAD)


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
