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
from shoal.engines.base import Task, TaskResult, estimate_steps
from shoal.engines.workers.chunking import split_by_duration
from shoal.engines.workers.fork_worker import WorkerFailure
from shoal.engines.workers.ray_handle import PendingChunk, RayActorHandle
from shoal.engines.workers.tensor_pickle import pickle_with_tensors, unpickle_with_tensors, view_tensor_bytes

log = logging.getLogger("shoal")
MAX_JOB_DEATHS = 2
"""So many workers may die of a job before it is given up."""
MAX_START_FAILURES = 3
"""So often in a row the start of an actor may fail."""
START_TIMEOUT = 120.0
"""Seconds to wait for the first actor; on a busy cluster there may be no room for any."""


class RayScheduler:
    """Chunks are begun in order, the longest first; the first of those that fail is the same whoever answers first."""

    def __init__(
        self,
        hands: list[RayActorHandle],
        sites: Mapping[TrainingSetup, tuple[int, Any]],
        tasks: Sequence[Task],
        lanes: int,
        patience: float,
        pace: float,
        room: int,
    ):
        self.hands, self.sites, self.tasks, self.patience = hands, sites, tasks, patience
        self.live = frozenset(number for number, _ in sites.values())
        self.steps = work = [estimate_steps(task) for task in tasks]
        self.waiting = deque(split_by_duration(work, pace, len(hands), lanes))
        self.rank = {i: at for at, i in enumerate(chain.from_iterable(self.waiting))}
        self.common = store_common_tensors(tasks)
        self.deaths: Counter[int] = Counter()
        self.done: dict[int, TaskResult] = {}
        self.failed: dict[int, BaseException] = {}
        self.spent = 0.0
        """Seconds of all actors together."""
        self.room, self.lent = room, list[weakref.ref[np.ndarray]]()
        """Bytes of answers that may still be read in the store itself, and where that was done."""

    @property
    def seconds_per_step(self) -> float:
        """Seconds that a step took."""
        return self.spent / max(1.0, sum(self.steps))

    def run_chunks(self) -> None:
        """Until every job has its end or, after a failure, until everybody is idle."""
        began = monotonic()
        while self.waiting or any(hand.orders for hand in self.hands):
            self.assign_chunks()
            waited = {hand.greeting: hand for hand in self.hands if hand.greeting}
            waited |= {order.ref: hand for hand in self.hands for order in hand.orders}
            until = min(hand.compute_deadline(self.patience) for hand in self.hands)
            if all(hand.greeting for hand in self.hands):
                until = min(until, began + START_TIMEOUT)
            limit = None if until == inf else max(0.0, until - monotonic())
            ready, _ = ray.wait(list(waited), num_returns=1, timeout=limit)
            for ref in ready:
                self.receive_result(waited[ref], ref)
            for hand in self.hands:
                if hand.compute_deadline(self.patience) <= monotonic():
                    self.replace_actor(hand, f"did not end within {self.patience:g} s for each device")
            if any(not hand.greeting for hand in self.hands):
                began = monotonic()
            elif monotonic() - began > START_TIMEOUT:
                problem = (
                    f"No worker of the Ray cluster could start within {START_TIMEOUT:g} s; others may hold all it has."
                )
                raise ShoalError("no-device", problem, "See `ray status`, and wait for the others or add machines.")

    def assign_chunks(self) -> None:
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
                            self.send_chunk(hand, self.waiting.popleft())

    def send_chunk(self, hand: RayActorHandle, chunk: list[int]) -> None:
        own = [self.tasks[i] for i in chunk]
        sites = {task.setup: self.sites[task.setup] for task in own}
        crate = pickle_with_tensors(
            [(sites[t.setup][0], t.job, t.memory) for t in own], lambda t: self.common.get(id(t))
        )
        new = {number: ref for number, ref in sites.values() if number not in hand.sites}
        crate = crate._replace(shared=[ref for ref in crate.shared if ref != hand.box])
        hand.sites.update(new)
        hand.box = crate.shared[0] if crate.shared else hand.box
        hand.add_chunk(PendingChunk(chunk, hand.actor.train.remote(crate, new, self.live)))

    def receive_result(self, hand: RayActorHandle, ref: Any) -> None:
        """Take an answer, after its actor has been given something new; or take note of a death."""
        if ref == hand.greeting:
            return self.check_start(hand)
        order = next((order for order in hand.orders if order.ref == ref), None)
        if order is None:  # it was buried a moment ago
            return
        try:
            answer = ray.get(ref)
        except RayTaskError as error:
            hand.remove_chunk(order)
            return self.record_failure(order.chunk, error.cause)
        except RayError as error:
            return self.replace_actor(hand, f"died ({describe_error(error)})")
        hand.remove_chunk(order)
        self.assign_chunks()
        self.record_result(order.chunk, answer)

    def record_result(self, chunk: list[int], answer: Any) -> None:
        arrays = [own for own in answer.own if isinstance(own, np.ndarray)]
        self.room -= sum(len(array) for array in arrays)
        copy = self.room < 0
        seconds, found = unpickle_with_tensors(answer, [], self.tasks[chunk[0]].setup.net.place, copy)
        self.spent += seconds
        if isinstance(found, WorkerFailure):
            return self.record_failure(chunk, found.error)
        if not copy:
            self.lent += map(weakref.ref, arrays)
            found = [TaskResult(outcome, tree.map_tensors(Tensor.clone, memory)) for outcome, memory in found]
        self.done.update(zip(chunk, found, strict=True))

    def record_failure(self, chunk: list[int], error: BaseException) -> None:
        """Nothing new is begun."""
        self.failed[self.rank[chunk[0]]] = error
        self.waiting.clear()
        for hand in self.hands:
            hand.clear_references()

    def check_start(self, hand: RayActorHandle) -> None:
        """An actor is there, or could not be started."""
        try:
            ray.get(hand.greeting)
        except RayError as error:
            hand.failures += 1
            if hand.failures < MAX_START_FAILURES:
                return hand.start()
            cause = str(error).strip().splitlines()[-1].strip()[:160]
            problem = f"A worker of the Ray cluster cannot be started ({cause})."
            raise ShoalError("no-device", problem, "Every machine needs the same Python, shoal and Ray.") from error
        hand.greeting, hand.failures = None, 0

    def replace_actor(self, hand: RayActorHandle, why: str) -> None:
        """An actor died or hangs: another takes its place. What it had not begun is not to blame."""
        ray.kill(hand.actor)
        lost = []
        for order in hand.orders:
            try:
                self.record_result(order.chunk, ray.get(order.ref, timeout=60))
            except RayError:
                lost.append(order.chunk)
        hand.start()
        if self.failed:
            return
        self.waiting.extendleft(reversed(lost[1:]))
        if lost:
            self.retry_or_drop_devices(lost[0], why)

    def retry_or_drop_devices(self, chunk: list[int], why: str) -> None:
        """Each device of the chunk is tried once more, and by itself."""
        devices = ", ".join(str(self.tasks[i].job.device) for i in chunk)
        log.warning("A worker that trained the devices %s %s.", devices, why)
        self.deaths.update(chunk)
        for i in reversed(chunk):
            if self.deaths[i] < MAX_JOB_DEATHS:
                self.waiting.appendleft([i])
            else:
                problem = f"{self.deaths[i]} workers were lost with it; the last {why}"
                self.done[i] = TaskResult(Outcome(self.tasks[i].job.device, problem=problem), self.tasks[i].memory)


def store_common_tensors(tasks: Sequence[Task]) -> dict[int, tuple[Any, int]]:
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
    box = ray.put([view_tensor_bytes(met[key]) for key in several])
    return {key: (box, number) for number, key in enumerate(several)}
