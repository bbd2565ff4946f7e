"""An actor of a Ray cluster as the one who hands out the work sees it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any


@dataclass(frozen=True)
class PendingChunk:
    """A chunk that an actor was given."""

    chunk: list[int]
    ref: Any


class RayActorHandle:
    """One actor, the orders that it has been given, and since when it works on the first of them."""

    def __init__(self, hire: Callable[[], Any]):
        self.hire, self.failures = hire, 0
        self.start()

    def start(self) -> None:
        self.actor = self.hire()
        self.greeting = self.actor.ready.remote()
        """What says that the actor is there; None afterwards."""
        self.orders: deque[PendingChunk] = deque()
        self.since = inf
        self.clear_references()

    def clear_references(self) -> None:
        """What it has been told of need not be told again: every reference that travels costs a millisecond."""
        self.sites: set[int] = set()
        self.box: Any = None

    def add_chunk(self, order: PendingChunk) -> None:
        self.orders.append(order)
        if len(self.orders) == 1:
            self.since = monotonic()

    def remove_chunk(self, order: PendingChunk) -> None:
        self.orders.remove(order)
        self.since = monotonic() if self.orders else inf

    def compute_deadline(self, patience: float) -> float:
        return self.since + patience * len(self.orders[0].chunk) if self.orders else inf
