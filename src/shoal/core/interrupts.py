"""Signal handling: Ctrl-C and SIGTERM stop a run so that it can be resumed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.core.errors import ShoalError

STOP_KINDS = ("interrupted", "terminated")
"""The kinds of errors that a stopped run ends with."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM; a KeyboardInterrupt, so that code which handles Ctrl-C handles it too."""


def stop_error(by: KeyboardInterrupt, problem: str, advice: str) -> ShoalError:
    """The error for a run that was stopped, with exit code 143 for SIGTERM and 130 for Ctrl-C."""
    return ShoalError("terminated" if isinstance(by, Terminated) else "interrupted", problem, advice)


class StopHandler:
    """A signal handler that raises KeyboardInterrupt or Terminated; with `once`, for the first signal only."""

    def __init__(self, once: bool):
        self.once, self.raised = once, False

    def handle(self, number: int, _: object) -> None:
        if not (self.once and self.raised):
            self.raised = True
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


@contextmanager
def stop_on_sigterm(once: bool = False) -> Iterator[None]:
    """Inside, SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt.

    With `once`, signals after the first are ignored, so that they do not interrupt saving; a second one comes when all
    processes of a run are signalled and signal each other too. A handler that a user has set, or a signal that is
    ignored, stays as it is. In threads other than the main one nothing happens.
    """
    stopper = StopHandler(once)
    handlers = (
        {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if is_main_thread() else {}
    )
    replaced = {number: handler for number, handler in handlers.items() if is_default_handler(handler)}
    try:
        for number in replaced:
            signal.signal(number, stopper.handle)
        yield
    finally:
        for number, handler in replaced.items():
            if signal.getsignal(number) == stopper.handle:
                signal.signal(number, handler)


def is_default_handler(handler: object) -> bool:
    """Whether a handler is Python's default or a `StopHandler`."""
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(
        getattr(handler, "__self__", None), StopHandler
    )


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM afterwards; for calls into libraries that replace it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def was_terminated(error: BaseException | None) -> bool:
    """Whether an exception or one of its causes is `Terminated`."""
    while error is not None and not isinstance(error, Terminated):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def delay_signals() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM are collected; they are raised afterwards."""
    if not is_main_thread():
        yield
        return
    pending: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    replaced = {number: handler for number, handler in handlers.items() if handler is not None}
    try:
        for number in replaced:
            signal.signal(number, lambda number, _: pending.append(number))
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
    for number in pending:
        signal.raise_signal(number)


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
