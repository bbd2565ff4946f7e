"""Watching a run: functions that are called after every round, may look at the model, and may stop the run."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any

from torch import nn

from shoal.core.errors import ShoalError, describe_error
from shoal.core.interrupts import STOP_KINDS
from shoal.core.ledger import Row
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.runs.history import History
from shoal.runs.recipe import Recipe

log = logging.getLogger("shoal")


@dataclass(frozen=True)
class Stop:
    """What a callback returns to end the run after this round: `return shoal.Stop("good enough")`."""

    why: str = "a callback said so"

    def __post_init__(self):
        if not isinstance(self.why, str) or not self.why.strip():
            raise ShoalError("bad-value", "Stop is given no words.", 'Say why: shoal.Stop("good enough").')


@dataclass(frozen=True, eq=False)
class WatchedRound:
    """What a callback sees of a round that is over: its row, the history so far, and the model if it asks for it."""

    recipe: Recipe
    row: Row
    history: History
    make_model: Callable[[], tuple[Net, Params]] | None = None

    @property
    def number(self) -> int:
        """How many rounds are over."""
        return len(self.history)

    @property
    def params(self) -> Params:
        """The tensors of the model that is judged after this round, by name; made when they are asked for."""
        return self._get_model()[1]

    def module(self) -> nn.Module:
        """The model that is judged after this round, as a module of its own; made when it is asked for."""
        return make_trained_module(*self._get_model())

    def _get_model(self) -> tuple[Net, Params]:
        if self.make_model is None:
            problem = "The model of this run is in another process, and cannot be looked at from here."
            raise ShoalError("bad-value", problem, "Leave `workers` at 1.")
        return self.make_model()


Watcher = Callable[[Recipe, Row, History], Any]
"""Called after every round; it may return a `Stop`."""
Callback = Callable[[WatchedRound], Any]
"""The same with one argument, which also has the model."""

_current_model: ContextVar[Callable[[], tuple[Net, Params]] | None] = ContextVar("current_model", default=None)


@contextmanager
def offer_model(make_model: Callable[[], tuple[Net, Params]]) -> Iterator[None]:
    """Inside, callbacks can ask for the model that `make_model` makes."""
    token = _current_model.set(make_model)
    try:
        yield
    finally:
        _current_model.reset(token)


def make_trained_module(net: Net, params: Params) -> nn.Module:
    """A net with these tensors as an ordinary module, with frozen tensors of its own."""
    module = copy_module(net)
    module.load_state_dict(params, strict=False)
    return (deepcopy(module) if net.frozen else module).eval()


class GuardedWatchers:
    """Calls several watchers after every round, and leaves out from then on those that raise: no run ends by them."""

    def __init__(self, watchers: Sequence[tuple[str, Watcher]]):
        self.watchers = list(watchers)
        self.warned: set[str] = set()

    def __call__(self, recipe: Recipe, row: Row, history: History) -> Stop | None:
        stop = None
        for named in list(self.watchers):
            name, watcher = named
            try:
                answer = watcher(recipe, row, history)
            except Exception as error:
                if isinstance(error, ShoalError) and error.kind.name in STOP_KINDS:
                    raise
                self.watchers.remove(named)
                log.warning("%s It is not called again, and the run goes on.", describe_fault(name, error))
                continue
            answer = Stop() if answer is Stop else answer
            if answer is True and name not in self.warned:
                self.warned.add(name)
                log.warning('%s returned True, which means nothing: return shoal.Stop("why") to stop the run.', name)
            if isinstance(answer, Stop) and stop is None:
                stop = answer
                row.setdefault("stopped", answer.why)  # which those that follow see
        return stop


def describe_fault(name: str, error: Exception) -> str:
    """A sentence about what a watcher raised, and where."""
    if isinstance(error, ShoalError):
        return error.problem
    frames = extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return f"{name} raised {describe_error(error)}{where}."


def join_watchers(watch: Watcher | None, callbacks: Sequence[Callback] | Callback = ()) -> Watcher | None:
    """One watcher of all: callbacks first, so that the other sees in the row whether they stopped the run."""
    given = [callbacks] if callable(callbacks) else list(callbacks)
    for thing in [*given, *([] if watch is None else [watch])]:
        if not callable(thing):
            problem = f"A callback is {type(thing).__name__}, which cannot be called."
            raise ShoalError("bad-value", problem, "Give a function of one argument, the round.")
    named = [(f"The callback {name_callback(callback)}", adapt_callback(callback)) for callback in given]
    named += [] if watch is None else [(f"The watcher {name_callback(watch)}", watch)]
    return GuardedWatchers(named) if named else None


def adapt_callback(callback: Callback) -> Watcher:
    def watch(recipe: Recipe, row: Row, history: History) -> Any:
        return callback(WatchedRound(recipe, row, history, _current_model.get()))

    return watch


def name_callback(function: Callable) -> str:
    return getattr(function, "__qualname__", "") or type(function).__name__
