"""The scheduler's view of one Ray actor: its handle, and the chunks that it has been sent."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any


@dataclass(frozen=True)
class PendingChunk:
    """The task numbers of a chunk that an actor was sent, and the reference to its result."""

    tasks: list[int]
    ref: Any


class RayActorHandle:
    """One actor, the chunks that it has been sent, and since when it works on the first of them."""

    def __init__(self, make_actor: Callable[[], Any]):
        self.make_actor, self.failures = make_actor, 0
        self.start()

    def start(self) -> None:
        self.actor = self.make_actor()
        self.start_ref = self.actor.ready.remote()
        """The reference that is ready once the actor has started; None from then on."""
        self.pending: deque[PendingChunk] = deque()
        self.busy_since = inf
        self.clear_references()

    def clear_references(self) -> None:
        """Forget which setups and shared tensors the actor has: all references are sent again.

        References are sent once only, because each costs about a millisecond.
        """
        self.known_setups: set[int] = set()
        self.shared_ref: Any = None

    def add_chunk(self, chunk: PendingChunk) -> None:
        self.pending.append(chunk)
        if len(self.pending) == 1:
            self.busy_since = monotonic()

    def remove_chunk(self, chunk: PendingChunk) -> None:
        self.pending.remove(chunk)
        self.busy_since = monotonic() if self.pending else inf

    def compute_deadline(self, task_timeout: float) -> float:
        return self.busy_since + task_timeout * len(self.pending[0].tasks) if self.pending else inf
