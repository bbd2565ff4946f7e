"""One call of `train` on a Ray cluster: what waits, what is under way, what is done, and what is given up.

Every job ends in exactly one way: with a reply, or, when a second worker died of it or hung with it, as a device that
drops out of the round. An exception is nobody's death: it is handed on.
"""

import logging
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.device import TrainingSetup
from shoal.core.model import tree
from shoal.core.types import Outcome
from shoal.engines.base import Done, Task
from shoal.engines.batched.engine import expected
from shoal.engines.workers.chunking import cut
from shoal.engines.workers.fork_worker import Failure
from shoal.engines.workers.ray_handle import Hand, Order
from shoal.engines.workers.tensor_pickle import packed, raw, unpacked

log = logging.getLogger("shoal")
DEATHS = 2
"""So many workers may die of a job before it is given up."""
STARTS = 3
"""So often in a row the start of an actor may fail."""
WAIT = 120.0
"""Seconds to wait for the first actor; on a busy cluster there may be no room for any."""


class Shift:
    """Chunks are begun in order, the longest first; the first of those that fail is the same whoever answers first."""

    def __init__(
        self,
        hands: list[Hand],
        sites: Mapping[TrainingSetup, tuple[int, Any]],
        tasks: Sequence[Task],
        lanes: int,
        patience: float,
        pace: float,
        room: int,
    ):
        self.hands, self.sites, self.tasks, self.patience = hands, sites, tasks, patience
        self.live = frozenset(number for number, _ in sites.values())
        self.steps = work = [expected(task) for task in tasks]
        self.waiting = deque(cut(work, pace, len(hands), lanes))
        self.rank = {i: at for at, i in enumerate(chain.from_iterable(self.waiting))}
        self.common = common(tasks)
        self.deaths: Counter[int] = Counter()
        self.done: dict[int, Done] = {}
        self.failed: dict[int, BaseException] = {}
        self.spent = 0.0
        """Seconds of all actors together."""
        self.room, self.lent = room, list[weakref.ref[np.ndarray]]()
        """Bytes of answers that may still be read in the store itself, and where that was done."""

    @property
    def pace(self) -> float:
        """Seconds that a step took."""
        return self.spent / max(1.0, sum(self.steps))

    def work(self) -> None:
        """Until every job has its end or, after a failure, until everybody is idle."""
        began = monotonic()
        while self.waiting or any(hand.orders for hand in self.hands):
            self.hand_out()
            waited = {hand.greeting: hand for hand in self.hands if hand.greeting}
            waited |= {order.ref: hand for hand in self.hands for order in hand.orders}
            until = min(hand.deadline(self.patience) for hand in self.hands)
            if all(hand.greeting for hand in self.hands):
                until = min(until, began + WAIT)
            limit = None if until == inf else max(0.0, until - monotonic())
            ready, _ = ray.wait(list(waited), num_returns=1, timeout=limit)
            for ref in ready:
                self.hear(waited[ref], ref)
            for hand in self.hands:
                if hand.deadline(self.patience) <= monotonic():
                    self.bury(hand, f"did not end within {self.patience:g} s for each device")
            if any(not hand.greeting for hand in self.hands):
                began = monotonic()
            elif monotonic() - began > WAIT:
                problem = f"No worker of the Ray cluster could start within {WAIT:g} s; others may hold all it has."
                raise ShoalError("no-device", problem, "See `ray status`, and wait for the others or add machines.")

    def hand_out(self) -> None:
        """One order for everybody, then a second one, to be there when the first is done, if there are enough.

        A device that a worker died of is alone with the next one: if that dies too, it is clear of what.
        """
        there = [hand for hand in self.hands if not hand.greeting]
        for most in (1, 2):
            if most == 1 or len(self.waiting) >= len(self.hands):
                for hand in there:
                    if self.waiting and len(hand.orders) < most:
                        near = [*self.waiting[0], *(i for order in hand.orders for i in order.chunk)]
                        if most == 1 or not any(self.deaths[i] for i in near):
                            self.give(hand, self.waiting.popleft())

    def give(self, hand: Hand, chunk: list[int]) -> None:
        own = [self.tasks[i] for i in chunk]
        sites = {task.site: self.sites[task.site] for task in own}
        crate = packed([(sites[t.site][0], t.job, t.memory) for t in own], lambda t: self.common.get(id(t)))
        new = {number: ref for number, ref in sites.values() if number not in hand.sites}
        crate = crate._replace(shared=[ref for ref in crate.shared if ref != hand.box])
        hand.sites.update(new)
        hand.box = crate.shared[0] if crate.shared else hand.box
        hand.give(Order(chunk, hand.actor.train.remote(crate, new, self.live)))

    def hear(self, hand: Hand, ref: Any) -> None:
        """Take an answer, after its actor has been given something new; or take note of a death."""
        if ref == hand.greeting:
            return self.greet(hand)
        order = next((order for order in hand.orders if order.ref == ref), None)
        if order is None:  # it was buried a moment ago
            return
        try:
            answer = ray.get(ref)
        except RayTaskError as error:
            hand.take_back(order)
            return self.fail(order.chunk, error.cause)
        except RayError as error:
            return self.bury(hand, f"died ({describe_error(error)})")
        hand.take_back(order)
        self.hand_out()
        self.read(order.chunk, answer)

    def read(self, chunk: list[int], answer: Any) -> None:
        arrays = [own for own in answer.own if isinstance(own, np.ndarray)]
        self.room -= sum(len(array) for array in arrays)
        copy = self.room < 0
        seconds, found = unpacked(answer, [], self.tasks[chunk[0]].site.net.place, copy)
        self.spent += seconds
        if isinstance(found, Failure):
            return self.fail(chunk, found.error)
        if not copy:
            self.lent += map(weakref.ref, arrays)
            found = [Done(outcome, tree.map_tensors(Tensor.clone, memory)) for outcome, memory in found]
        self.done.update(zip(chunk, found, strict=True))

    def fail(self, chunk: list[int], error: BaseException) -> None:
        """Nothing new is begun."""
        self.failed[self.rank[chunk[0]]] = error
        self.waiting.clear()
        for hand in self.hands:
            hand.forget()

    def greet(self, hand: Hand) -> None:
        """An actor is there, or could not be started."""
        try:
            ray.get(hand.greeting)
        except RayError as error:
            hand.failures += 1
            if hand.failures < STARTS:
                return hand.start()
            cause = str(error).strip().splitlines()[-1].strip()[:160]
            problem = f"A worker of the Ray cluster cannot be started ({cause})."
            raise ShoalError("no-device", problem, "Every machine needs the same Python, shoal and Ray.") from error
        hand.greeting, hand.failures = None, 0

    def bury(self, hand: Hand, why: str) -> None:
        """An actor died or hangs: another takes its place. What it had not begun is not to blame."""
        ray.kill(hand.actor)
        lost = []
        for order in hand.orders:
            try:
                self.read(order.chunk, ray.get(order.ref, timeout=60))
            except RayError:
                lost.append(order.chunk)
        hand.start()
        if self.failed:
            return
        self.waiting.extendleft(reversed(lost[1:]))
        if lost:
            self.blame(lost[0], why)

    def blame(self, chunk: list[int], why: str) -> None:
        """Each device of the chunk is tried once more, and by itself."""
        devices = ", ".join(str(self.tasks[i].job.device) for i in chunk)
        log.warning("A worker that trained the devices %s %s.", devices, why)
        self.deaths.update(chunk)
        for i in reversed(chunk):
            if self.deaths[i] < DEATHS:
                self.waiting.appendleft([i])
            else:
                problem = f"{self.deaths[i]} workers were lost with it; the last {why}"
                self.done[i] = Done(Outcome(self.tasks[i].job.device, problem=problem), self.tasks[i].memory)


def common(tasks: Sequence[Task]) -> dict[int, tuple[Any, int]]:
    """The tensors that several devices are sent lie in the store once; here is where, by their identity."""
    met: dict[int, Any] = {}
    uses: Counter[int] = Counter()
    for task in tasks:
        own = {id(t): t for t in tree.collect_tensors([task.job.message.body, task.job.message.beside])}
        met |= own
        uses.update(own.keys())
    several = [key for key in met if uses[key] > 1]
    if not several:
        return {}
    box = ray.put([raw(met[key]) for key in several])
    return {key: (box, number) for number, key in enumerate(several)}
