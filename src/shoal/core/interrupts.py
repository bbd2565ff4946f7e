"""How a run is stopped from outside: Ctrl-C by hand, SIGTERM by schedulers. Both keep what was reached."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.core.errors import ShoalError

STOP_KINDS = ("interrupted", "terminated")
"""The kinds of errors that a stopped run ends with."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever Ctrl-C would end, this ends in the same way."""


def stop_error(by: KeyboardInterrupt, problem: str, advice: str) -> ShoalError:
    """The error that tells how a run was stopped, with the exit code that its signal stands for."""
    return ShoalError("terminated" if isinstance(by, Terminated) else "interrupted", problem, advice)


class StopHandler:
    """Raises what Ctrl-C and SIGTERM stand for, every time or once."""

    def __init__(self, once: bool):
        self.once, self.raised = once, False

    def handle(self, number: int, _: object) -> None:
        if not (self.once and self.raised):
            self.raised = True
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def stop_on_sigterm(once: bool = False) -> Iterator[None]:
    """Let SIGTERM stop what is done here as Ctrl-C does.

    With `once`, the first of the two signals is the only one that is heard: a second one, as it comes when all
    processes of a run are told and tell each other too, does not break off the saving.
    Whoever has handlers of their own, or ignores the signals, keeps that; threads other than the main one have none.
    """
    stopper = StopHandler(once)
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main_thread() else {}
    before = {number: handler for number, handler in found.items() if is_default_handler(handler)}
    try:
        for number in before:
            signal.signal(number, stopper.handle)
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) == stopper.handle:
                signal.signal(number, handler)


def is_default_handler(handler: object) -> bool:
    """Whether a handler is Python's or one of those above."""
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(
        getattr(handler, "__self__", None), StopHandler
    )


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """For calls into libraries that put a handler of SIGTERM of their own in place and leave it there."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def was_terminated(error: BaseException | None) -> bool:
    """Whether SIGTERM is what an exception came of."""
    while error is not None and not isinstance(error, Terminated):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def delay_signals() -> Iterator[None]:
    """Keep Ctrl-C and SIGTERM waiting until what was begun is complete."""
    if not is_main_thread():
        yield
        return
    waiting: list[int] = []
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in found.items() if handler is not None}
    try:
        for number in before:
            signal.signal(number, lambda number, _: waiting.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in waiting:
        signal.raise_signal(number)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
