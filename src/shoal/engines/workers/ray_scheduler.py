"""The scheduler of the engine `ray`: sends chunks to actors, collects results, and replaces actors that die or hang.

Every task ends in exactly one way: with a result, or, when a second actor died or hung while it trained the device, as
a device that drops out of the round. An exception in training is raised by the engine, and not tried again.
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
from shoal.core.task import Task, TaskResult, estimate_steps
from shoal.core.types import Outcome
from shoal.engines.workers.chunking import split_by_duration
from shoal.engines.workers.fork_worker import WorkerFailure
from shoal.engines.workers.ray_handle import PendingChunk, RayActorHandle
from shoal.engines.workers.tensor_pickle import pickle_with_tensors, unpickle_with_tensors, view_tensor_bytes

log = logging.getLogger("shoal")
MAX_JOB_DEATHS = 2
"""A device is given up when this many actors have died or hung while they trained it."""
MAX_START_FAILURES = 3
"""The engine gives up when the start of one actor has failed this many times in a row."""
START_TIMEOUT = 120.0
"""Seconds to wait while no actor has started; on a busy cluster there may be no room for any."""


class RayScheduler:
    """One call of `train`. Chunks are begun in order, so the first that fails does not depend on who replies first."""

    def __init__(
        self,
        handles: list[RayActorHandle],
        stored_setups: Mapping[TrainingSetup, tuple[int, Any]],
        tasks: Sequence[Task],
        width: int,
        task_timeout: float,
        seconds_per_step: float,
        zero_copy_bytes: int,
    ):
        self.handles, self.stored_setups, self.tasks, self.task_timeout = handles, stored_setups, tasks, task_timeout
        self.live_numbers = frozenset(number for number, _ in stored_setups.values())
        self.steps = steps = [estimate_steps(task) for task in tasks]
        self.queue = deque(split_by_duration(steps, seconds_per_step, len(handles), width))
        self.rank = {i: at for at, i in enumerate(chain.from_iterable(self.queue))}
        self.stored_tensors = store_common_tensors(tasks)
        self.deaths: Counter[int] = Counter()
        self.results: dict[int, TaskResult] = {}
        self.failures: dict[int, BaseException] = {}
        self.actor_seconds = 0.0
        """Seconds that all actors together have spent on training."""
        self.zero_copy_bytes, self.zero_copy_arrays = zero_copy_bytes, list[weakref.ref[np.ndarray]]()
        """Bytes of results that may still be read in the store without a copy, and the arrays that were read so."""

    @property
    def seconds_per_step(self) -> float:
        """Mean seconds that an actor took for a local step."""
        return self.actor_seconds / max(1.0, sum(self.steps))

    def run_chunks(self) -> None:
        """Run until every task has its end or, after a failure, until every actor is idle."""
        last_start = monotonic()
        while self.queue or any(handle.pending for handle in self.handles):
            self.assign_chunks()
            awaited = {handle.start_ref: handle for handle in self.handles if handle.start_ref}
            awaited |= {pending.ref: handle for handle in self.handles for pending in handle.pending}
            deadline = min(handle.compute_deadline(self.task_timeout) for handle in self.handles)
            if all(handle.start_ref for handle in self.handles):
                deadline = min(deadline, last_start + START_TIMEOUT)
            timeout = None if deadline == inf else max(0.0, deadline - monotonic())
            ready, _ = ray.wait(list(awaited), num_returns=1, timeout=timeout)
            for ref in ready:
                self.receive_result(awaited[ref], ref)
            for handle in self.handles:
                if handle.compute_deadline(self.task_timeout) <= monotonic():
                    self.replace_actor(handle, f"did not end within {self.task_timeout:g} s for each device")
            if any(not handle.start_ref for handle in self.handles):
                last_start = monotonic()
            elif monotonic() - last_start > START_TIMEOUT:
                problem = (
                    f"No worker of the Ray cluster could start within {START_TIMEOUT:g} s; others may hold all it has."
                )
                raise ShoalError("no-device", problem, "See `ray status`, and wait for the others or add machines.")

    def assign_chunks(self) -> None:
        """Send one chunk to every idle actor, then a second one to wait there, if there are enough for all.

        A device that an actor died of is sent alone: if the next actor dies too, the device is to blame.
        """
        started = [handle for handle in self.handles if not handle.start_ref]
        for limit in (1, 2):
            if limit == 1 or len(self.queue) >= len(self.handles):
                for handle in started:
                    if self.queue and len(handle.pending) < limit:
                        nearby = [*self.queue[0], *(i for pending in handle.pending for i in pending.tasks)]
                        if limit == 1 or not any(self.deaths[i] for i in nearby):
                            self.send_chunk(handle, self.queue.popleft())

    def send_chunk(self, handle: RayActorHandle, chunk: list[int]) -> None:
        tasks = [self.tasks[i] for i in chunk]
        setups = {task.setup: self.stored_setups[task.setup] for task in tasks}
        packed = pickle_with_tensors(
            [(setups[t.setup][0], t.job, t.memory) for t in tasks], lambda t: self.stored_tensors.get(id(t))
        )
        new = {number: ref for number, ref in setups.values() if number not in handle.known_setups}
        packed = packed._replace(shared_refs=[ref for ref in packed.shared_refs if ref != handle.shared_ref])
        handle.known_setups.update(new)
        handle.shared_ref = packed.shared_refs[0] if packed.shared_refs else handle.shared_ref
        handle.add_chunk(PendingChunk(chunk, handle.actor.train.remote(packed, new, self.live_numbers)))

    def receive_result(self, handle: RayActorHandle, ref: Any) -> None:
        """Store a result, after its actor has been sent its next chunk; or replace an actor that died."""
        if ref == handle.start_ref:
            return self.check_start(handle)
        pending = next((pending for pending in handle.pending if pending.ref == ref), None)
        if pending is None:  # its actor was replaced a moment ago
            return
        try:
            packed = ray.get(ref)
        except RayTaskError as error:
            handle.remove_chunk(pending)
            return self.record_failure(pending.tasks, error.cause)
        except RayError as error:
            return self.replace_actor(handle, f"died ({describe_error(error)})")
        handle.remove_chunk(pending)
        self.assign_chunks()
        self.record_result(pending.tasks, packed)

    def record_result(self, chunk: list[int], packed: Any) -> None:
        arrays = [array for array in packed.tensors if isinstance(array, np.ndarray)]
        self.zero_copy_bytes -= sum(len(array) for array in arrays)
        copy = self.zero_copy_bytes < 0
        seconds, result = unpickle_with_tensors(packed, [], self.tasks[chunk[0]].setup.net.place, copy)
        self.actor_seconds += seconds
        if isinstance(result, WorkerFailure):
            return self.record_failure(chunk, result.error)
        if not copy:
            self.zero_copy_arrays += map(weakref.ref, arrays)
            result = [TaskResult(outcome, tree.map_tensors(Tensor.clone, memory)) for outcome, memory in result]
        self.results.update(zip(chunk, result, strict=True))

    def record_failure(self, chunk: list[int], error: BaseException) -> None:
        """Store an exception, and begin no further chunk."""
        self.failures[self.rank[chunk[0]]] = error
        self.queue.clear()
        for handle in self.handles:
            handle.clear_references()

    def check_start(self, handle: RayActorHandle) -> None:
        """Note that an actor has started; where it failed, start it again, or raise after too many failures."""
        try:
            ray.get(handle.start_ref)
        except RayError as error:
            handle.failures += 1
            if handle.failures < MAX_START_FAILURES:
                return handle.start()
            cause = str(error).strip().splitlines()[-1].strip()[:160]
            problem = f"A worker of the Ray cluster cannot be started ({cause})."
            raise ShoalError("no-device", problem, "Every machine needs the same Python, shoal and Ray.") from error
        handle.start_ref, handle.failures = None, 0

    def replace_actor(self, handle: RayActorHandle, why: str) -> None:
        """Start another actor for one that died or hangs; of its chunks only the first counts as lost."""
        ray.kill(handle.actor)
        lost = []
        for pending in handle.pending:
            try:
                self.record_result(pending.tasks, ray.get(pending.ref, timeout=60))
            except RayError:
                lost.append(pending.tasks)
        handle.start()
        if self.failures:
            return
        self.queue.extendleft(reversed(lost[1:]))
        if lost:
            self.retry_or_drop_devices(lost[0], why)

    def retry_or_drop_devices(self, chunk: list[int], why: str) -> None:
        """Queue each device of a lost chunk by itself, or let it drop out of the round after too many deaths."""
        devices = ", ".join(str(self.tasks[i].job.device) for i in chunk)
        log.warning("A worker that trained the devices %s %s.", devices, why)
        self.deaths.update(chunk)
        for i in reversed(chunk):
            if self.deaths[i] < MAX_JOB_DEATHS:
                self.queue.appendleft([i])
            else:
                problem = f"{self.deaths[i]} workers were lost with it; the last {why}"
                self.results[i] = TaskResult(Outcome(self.tasks[i].job.device, problem=problem), self.tasks[i].memory)


def store_common_tensors(tasks: Sequence[Task]) -> dict[int, tuple[Any, int]]:
    """Put the tensors that several devices are sent into the store once; by `id`, their reference and number there."""
    tensors: dict[int, Any] = {}
    uses: Counter[int] = Counter()
    for task in tasks:
        sent = {id(t): t for t in tree.collect_tensors([task.job.message.body, task.job.message.beside])}
        tensors |= sent
        uses.update(sent.keys())
    common = [key for key in tensors if uses[key] > 1]
    if not common:
        return {}
    ref = ray.put([view_tensor_bytes(tensors[key]) for key in common])
    return {key: (ref, number) for number, key in enumerate(common)}
