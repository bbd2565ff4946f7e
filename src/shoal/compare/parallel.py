"""Runs of a comparison in several processes: for runs too small to keep a machine busy from one process.

A GPU that waits for Python between rounds serves several processes as quickly as one. Each process takes every n-th run
and trains side by side what it can; rounds are told to the parent, results are read from the runs' folders.
"""

import logging
import os
import signal
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
from shoal.core.errors import ShoalError, describe_error
from shoal.core.interrupts import stop_error, stop_on_sigterm
from shoal.runs.history import History
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, Watcher
from shoal.runs.start import load_result
from shoal.runs.warn_once import warn_once

PATIENCE = 60
"""Seconds that a process has to write down where it is, when it is told to stop."""


def run_in_processes(recipes: Sequence[Recipe], workers: int, watch: Watcher | None) -> dict[Recipe, Result]:
    """Every run brought to its end, by so many processes."""
    with TemporaryDirectory(prefix="shoal-runs-") as place:
        placed = [r if r.out else r.with_values(out=f"{place}/{i}") for i, r in enumerate(recipes)]
        follow_processes(placed, min(workers, len(placed)), watch, pack_objects(recipes, Path(place)))
        made = {recipe: load_result(Path(own.out)) for recipe, own in zip(recipes, placed)}
    return {recipe: replace(result, recipe=recipe) for recipe, result in made.items()}


@stop_on_sigterm()
def follow_processes(
    recipes: Sequence[Recipe], workers: int, watch: Watcher | None, luggage: TransferredObjects
) -> None:
    """Start the processes, pass on what they tell, and stop all of them when one fails."""
    context, started = get_context("spawn"), {}
    for number in range(workers):
        near, far = context.Pipe(duplex=False)
        process = context.Process(target=run_worker, args=(far, recipes[number::workers], luggage), daemon=True)
        process.start()
        far.close()
        started[near] = process
    histories, open_ends = {recipe: History() for recipe in recipes}, set(started)
    begun: set[Connection] = set()
    try:
        while open_ends:
            for end in wait(list(open_ends)):
                assert isinstance(end, Connection)
                message = receive_message(end)
                if isinstance(message, ShoalError):
                    raise message
                if message is None:
                    open_ends.discard(end)
                    continue
                if isinstance(message, WarningMessage):
                    warn_once(message.text)
                    continue
                begun.add(end)
                recipe, row = message
                histories[recipe].append(row)
                if watch:
                    watch(recipe, row, histories[recipe])
    except KeyboardInterrupt as error:
        raise stop_error(error, "Stopped.", "What was reached is in the folders of the runs.") from None
    finally:
        stop_processes(started, open_ends, begun)


def stop_processes(
    started: Mapping[Connection, BaseProcess], busy: Collection[Connection], begun: Collection[Connection]
) -> None:
    """The busy are told to stop, and what they still say is taken off their hands: a full pipe would hold them up.

    Those without a round yet have nothing to keep, and may be in the middle of an import: they are ended at once.
    """
    for end in busy:
        process = started[end]
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGINT if end in begun else signal.SIGTERM)
    ends, until = set(busy), perf_counter() + PATIENCE
    while ends and (ready := wait(list(ends), max(0.0, until - perf_counter()))):
        ends -= {end for end in ends if end in ready and drain_pipe(end)}
    for process in started.values():
        process.join(max(0.0, until - perf_counter()))
        if process.is_alive():
            process.kill()


def drain_pipe(end: Connection) -> bool:
    """Read some bytes, which may be half a message; whether there will be no more."""
    try:
        return not os.read(end.fileno(), 2**16)
    except OSError:
        return True


def receive_message(end: Connection):
    """A round that was played, a failure, or None when a process is done."""
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
    """Sends warnings to the parent; several processes would each say the same."""

    def __init__(self, end: Connection):
        super().__init__(logging.WARNING)
        self.end = end

    def emit(self, record: logging.LogRecord) -> None:
        self.end.send(WarningMessage(record.getMessage()))


def run_worker(end: Connection, recipes: Sequence[Recipe], luggage: TransferredObjects) -> None:
    """What a process does: its own runs, one after the other or side by side."""
    import shoal.data.noise  # noqa: F401
    from shoal.compare.comparison import finish_group, group_similar_recipes

    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent, which passes it on once
    torch.set_num_threads(1)
    logging.getLogger("shoal").addHandler(ParentLogHandler(end))
    with suppress(BrokenPipeError, KeyboardInterrupt):  # nobody listens any more; stopped between two runs
        try:
            unpack_objects(luggage)
            for group in group_similar_recipes(recipes):
                finish_group(group, lambda recipe, row, history: end.send((recipe, row)))
            end.send(None)
        except BrokenPipeError:
            raise
        except ShoalError as error:
            end.send(error)
        except Exception as error:
            problem = f"A process that trained some of the runs broke ({describe_error(error)})."
            end.send(ShoalError("bug", problem, "Leave `workers` at 1 to see where, and please report it."))
