"""Runs of a comparison in several processes: for runs too small to keep a machine busy from one process.

A GPU that waits for Python between rounds serves several processes as quickly as one. Each process takes a share of
similar runs and, when they are over, the next one; rows are sent to the parent, results are read from the folders of
the runs.
"""

import logging
import os
import signal
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from shoal.compare.object_transfer import TransferredObjects, pack_objects, unpack_objects
from shoal.compare.run_groups import divide_among_processes
from shoal.core.errors import ShoalError, describe_error
from shoal.core.interrupts import stop_error, stop_on_sigterm
from shoal.runs.history import History
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, Watcher
from shoal.runs.start import load_result
from shoal.runs.warn_once import warn_once

STOP_SECONDS = 60
"""Seconds that a process has to write its checkpoints when it is told to stop."""


def run_in_processes(recipes: Sequence[Recipe], workers: int, watch: Watcher | None) -> dict[Recipe, Result]:
    """Play all runs to their end in so many processes; the result of each recipe."""
    with TemporaryDirectory(prefix="shoal-runs-") as folder:
        with_folders = [r if r.out else r.with_values(out=f"{folder}/{i}") for i, r in enumerate(recipes)]
        follow_processes(with_folders, min(workers, len(with_folders)), watch, pack_objects(recipes, Path(folder)))
        results = {recipe: load_result(Path(with_folder.out)) for recipe, with_folder in zip(recipes, with_folders)}
    return {recipe: replace(result, recipe=recipe) for recipe, result in results.items()}


@stop_on_sigterm()
def follow_processes(
    recipes: Sequence[Recipe], workers: int, watch: Watcher | None, objects: TransferredObjects
) -> None:
    """Start the processes, hand out shares, pass their rows to `watch`, and stop all of them when one fails."""
    waiting = deque(divide_among_processes(recipes, workers))
    context, started = get_context("spawn"), {}
    for _ in range(min(workers, len(waiting))):
        own, other = context.Pipe()
        process = context.Process(target=run_worker, args=(other, waiting.popleft(), objects), daemon=True)
        process.start()
        other.close()
        started[own] = process
    histories: dict[Recipe, History] = {}
    open_ends = set(started)
    playing: set[Connection] = set()
    try:
        while open_ends:
            for end in wait(list(open_ends)):
                assert isinstance(end, Connection)
                message = receive_message(end)
                if isinstance(message, ShoalError):
                    raise message
                if message is None:
                    share = waiting.popleft() if waiting else None
                    (open_ends if share is None else playing).discard(end)
                    with suppress(OSError):  # it has died, which the next message tells
                        end.send(share)
                    continue
                if isinstance(message, WarningMessage):
                    warn_once(message.text)
                    continue
                playing.add(end)
                recipe, row, headline = message
                history = histories.setdefault(recipe, History(headline=headline))
                history.append(row)
                if watch:
                    watch(recipe, row, history)
    except KeyboardInterrupt as error:
        raise stop_error(error, "Stopped.", "What was reached is in the folders of the runs.") from None
    finally:
        stop_processes(started, open_ends, playing)


def stop_processes(
    started: Mapping[Connection, BaseProcess], busy: Collection[Connection], playing: Collection[Connection]
) -> None:
    """Stop the busy processes, and empty their pipes meanwhile, since a full one would block them.

    Those without a round yet have nothing to save, and may be in the middle of an import: they are ended at once.
    """
    for end in busy:
        process = started[end]
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGINT if end in playing else signal.SIGTERM)
    ends, deadline = set(busy), perf_counter() + STOP_SECONDS
    while ends and (ready := wait(list(ends), max(0.0, deadline - perf_counter()))):
        ends -= {end for end in ends if end in ready and drain_pipe(end)}
    for process in started.values():
        process.join(max(0.0, deadline - perf_counter()))
        if process.is_alive():
            process.kill()


def drain_pipe(end: Connection) -> bool:
    """Read and drop some bytes of a pipe; whether it has ended."""
    try:
        return not os.read(end.fileno(), 2**16)
    except OSError:
        return True


def receive_message(end: Connection):
    """A recipe with a row and the name of its headline, a warning, an error, or None when a share is over."""
    try:
        return end.recv()
    except EOFError:
        problem = "A process that trained some of the runs has died."
        return ShoalError("interrupted", problem, "Go on with `shoal resume`, or use fewer workers.")


@dataclass(frozen=True)
class WarningMessage:
    """A warning of a process, for the parent to pass on once."""

    text: str


class ParentLogHandler(logging.Handler):
    """Sends warnings to the parent, which gives each once for all processes."""

    def __init__(self, end: Connection):
        super().__init__(logging.WARNING)
        self.end = end

    def emit(self, record: logging.LogRecord) -> None:
        self.end.send(WarningMessage(record.getMessage()))


def run_worker(end: Connection, first_share: Sequence[Recipe], objects: TransferredObjects) -> None:
    """What a worker process does: play the runs of share after share, and send every row to the parent."""
    import shoal.data.noise  # noqa: F401
    from shoal.compare.comparison import finish_group

    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent, which passes it on once
    torch.set_num_threads(1)
    logging.getLogger("shoal").addHandler(ParentLogHandler(end))
    with suppress(BrokenPipeError, KeyboardInterrupt):  # nobody listens any more; stopped between two runs
        try:
            unpack_objects(objects)
            share: Sequence[Recipe] | None = first_share
            while share:
                finish_group(share, lambda recipe, row, history: end.send((recipe, row, history.headline)))
                end.send(None)
                share = receive_share(end)
        except BrokenPipeError:
            raise
        except ShoalError as error:
            end.send(error)
        except Exception as error:
            problem = f"A process that trained some of the runs broke ({describe_error(error)})."
            end.send(ShoalError("bug", problem, "Leave `workers` at 1 to see where, and please report it."))


def receive_share(end: Connection) -> Sequence[Recipe] | None:
    """The next share; None where there is none, or nobody who would send one."""
    try:
        return end.recv()
    except (EOFError, OSError):
        return None
