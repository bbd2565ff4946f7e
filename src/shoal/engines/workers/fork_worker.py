"""The code of a worker process of the engine `pool`: detach from the parent, train chunks, exit with the parent."""

import gc
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from traceback import format_exc

import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.device import TrainingSetup
from shoal.core.task import Engine, Task
from shoal.engines.part_faults import explain_fault
from shoal.engines.workers.malloc import FreedMemory, keep_freed_memory
from shoal.engines.workers.scheduler import WorkerFailure
from shoal.engines.workers.shared_memory import SharedBuffer


def detach_from_parent(pipe: int, parent: int, kept_files: set[int]) -> None:
    """Prepare a new fork: ignore the signals that its parent gets too, close its files, exit with it, use one thread.

    All open files but `kept_files` are redirected to /dev/null: the lock of a run's folder and the pipes of other
    workers are the parent's alone. The descriptors stay taken, because inherited objects may still close them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    devnull = os.open(os.devnull, os.O_RDWR)
    kept_files |= {1, 2, devnull, pipe}
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            kept_files.add(stream.fileno())
    for number in map(int, os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")):
        if number not in kept_files:
            with suppress(OSError):
                os.fstat(number)
                os.dup2(devnull, number, inheritable=False)
    threading.Thread(target=exit_with_parent, args=(pipe, parent), daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()


def exit_with_parent(pipe: int, parent: int) -> None:
    """Exit as soon as the parent has ended, even in the middle of a chunk."""
    poller = select.poll()
    poller.register(pipe, 0)
    while os.getppid() == parent and not poller.poll(1000):
        pass
    os._exit(0)


def serve_chunks(
    pipe: Connection,
    task_buffers: Sequence[SharedBuffer],
    reply_buffers: Sequence[SharedBuffer],
    setups: dict[int, TrainingSetup],
    make_engine: Callable[[], Engine],
) -> None:
    """Receive chunks of tasks, train them, and send the results back, until the pipe is closed.

    A request says which buffer the tasks lie in, and which one the results go to.
    """
    engine, freed_memory = None, FreedMemory()
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        task_buffer, reply_buffer, content = task_buffers[request[0]], reply_buffers[request[1]], None
        try:
            content = task_buffer.read_object(request[2:], copy=False)
            engine = engine or build_worker_engine(make_engine)
            tasks = [Task(setups[number], job, memory) for number, job, memory in content]
            reply = reply_buffer.write_object(engine.train(tasks), most_rows=len(tasks))
        except BaseException as error:
            reply = reply_buffer.write_object(WorkerFailure(make_portable_error(error, setups.values())))
        tasks = content = None
        flush_stream(sys.stdout)
        pipe.send_bytes(reply)
        freed_memory.trim_if_due()


def build_worker_engine(make_engine: Callable[[], Engine]) -> Engine:
    """The worker's own engine. Beside a GPU, torch refuses gradients in forks of a process that has computed some."""
    one = torch.ones((), requires_grad=True)
    try:
        torch.autograd.grad(one * one, one)
    except RuntimeError as error:
        problem = "Worker processes cannot be started once this process has trained something itself beside a GPU."
        raise ShoalError("no-device", problem, "Use --engine batched, or set CUDA_VISIBLE_DEVICES= first.") from error
    return make_engine()


def flush_stream(stream) -> None:
    with suppress(AttributeError, OSError, ValueError):
        stream.flush()


def make_portable_error(error: BaseException, setups: Iterable[TrainingSetup]) -> BaseException:
    """An exception that can be pickled. A part that is to blame is named here, where the traceback still exists."""
    faults = [explain_fault(error, setup.method) for setup in setups] if isinstance(error, Exception) else []
    if not isinstance(error, ShoalError) and any(faults):
        return next(fault for fault in faults if fault)
    text = format_exc()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(describe_error(error))
    error.add_note(f"in a worker process:\n{text}")
    return error
