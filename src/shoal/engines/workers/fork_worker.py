"""What a worker process of the pool does: let go of what is its parent's, train chunks, die with its parent."""

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
from typing import NamedTuple

import torch

from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.device import TrainingSetup
from shoal.engines.base import Task, TrainingEngine
from shoal.engines.part_faults import explain_fault
from shoal.engines.workers.malloc import keep_freed_memory
from shoal.engines.workers.shared_memory import SharedBuffer


class WorkerFailure(NamedTuple):
    """An exception on its way to the parent."""

    error: BaseException


def detach_from_parent(pipe: int, parent: int, needed: set[int]) -> None:
    """Let go of what is the parent's, die with it and of no signal that it gets too, and use one core.

    Its open files lead nowhere from now on: the lock of a run's folder and the pipes of other workers are the parent's
    alone. The numbers stay taken, because objects of the parent may still close them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    nowhere = os.open(os.devnull, os.O_RDWR)
    needed |= {1, 2, nowhere, pipe}
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            needed.add(stream.fileno())
    for number in map(int, os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd")):
        if number not in needed:
            with suppress(OSError):
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)
    threading.Thread(target=exit_with_parent, args=(pipe, parent), daemon=True).start()
    torch.set_num_threads(1)
    keep_freed_memory()


def exit_with_parent(pipe: int, parent: int) -> None:
    """Die with the parent, even in the middle of a chunk."""
    end = select.poll()
    end.register(pipe, 0)
    while os.getppid() == parent and not end.poll(1000):
        pass
    os._exit(0)


def serve_chunks(
    pipe: Connection,
    arenas: Sequence[SharedBuffer],
    sites: dict[int, TrainingSetup],
    inner: Callable[[], TrainingEngine],
) -> None:
    """Train one chunk after the other."""
    crew, turn = None, 0
    while True:
        try:
            order = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        turn = 1 - turn
        try:
            crew = crew or build_worker_engine(inner)
            tasks = [
                Task(sites[number], job, memory) for number, job, memory in arenas[0].read_object(order, copy=False)
            ]
            answer = arenas[1 + turn].write_object(crew.train(tasks))
        except BaseException as error:
            answer = arenas[1 + turn].write_object(WorkerFailure(make_portable_error(error, sites.values())))
        tasks = None
        flush_stream(sys.stdout)
        pipe.send_bytes(answer)


def build_worker_engine(inner: Callable[[], TrainingEngine]) -> TrainingEngine:
    """A worker's own crew. Where there is a GPU, torch refuses gradients to forks of a process that has taken some."""
    one = torch.ones((), requires_grad=True)
    try:
        torch.autograd.grad(one * one, one)
    except RuntimeError as error:
        problem = "Worker processes cannot be started once this process has trained something itself beside a GPU."
        raise ShoalError("no-device", problem, "Use --engine batched, or set CUDA_VISIBLE_DEVICES= first.") from error
    return inner()


def flush_stream(stream) -> None:
    with suppress(AttributeError, OSError, ValueError):
        stream.flush()


def make_portable_error(error: BaseException, sites: Iterable[TrainingSetup]) -> BaseException:
    """An exception that survives the way: a stranger's part is named here, where it can still be seen."""
    faults = [explain_fault(error, site.method) for site in sites] if isinstance(error, Exception) else []
    if not isinstance(error, ShoalError) and any(faults):
        return next(fault for fault in faults if fault)
    text = format_exc()
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(describe_error(error))
    error.add_note(f"in a worker process:\n{text}")
    return error
