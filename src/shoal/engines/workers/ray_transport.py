"""Chunks and replies between the scheduler and the actors of a Ray cluster, through Ray's object store."""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
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
from shoal.core.task import Task, TaskResult
from shoal.engines.workers.ray_pickle import pickle_for_ray
from shoal.engines.workers.scheduler import WorkerDeath, WorkerFailure
from shoal.engines.workers.tensor_pickle import TensorPickle, unpickle_with_tensors, view_tensor_bytes

MAX_START_FAILURES = 3
"""The engine gives up when the start of one actor has failed this many times in a row."""
START_TIMEOUT = 120.0
"""Seconds to wait while no actor has started; on a busy cluster there may be no room for any."""
REPLY_TIMEOUT = 60.0
"""Seconds that it may take to fetch a reply that is there, or to learn that an actor which was ended left none."""


class RayWorker:
    """One actor, and the references to the replies that it owes; after its death another actor takes its place."""

    def __init__(self, make_actor: Callable[[], Any]):
        self.make_actor, self.start_failures = make_actor, 0
        self.start()

    def start(self) -> None:
        self.actor = self.make_actor()
        self.start_ref: Any = self.actor.ready.remote()
        """The reference that is ready once the actor has started; None from then on."""
        self.pending: deque[list[int]] = deque()
        self.reply_refs: deque[Any] = deque()
        self.forget_references()

    def forget_references(self) -> None:
        """Forget which setups and shared tensors the actor has: all references are sent again.

        References are sent once only, because each costs about a millisecond.
        """
        self.known_setups: set[int] = set()
        self.shared_ref: Any = None

    def check_start(self) -> None:
        """Note that the actor has started; where it failed, start it again, or raise after too many failures."""
        try:
            ray.get(self.start_ref)
        except RayError as error:
            self.start_failures += 1
            if self.start_failures < MAX_START_FAILURES:
                return self.start()
            cause = str(error).strip().splitlines()[-1].strip()[:160]
            problem = f"A worker of the Ray cluster cannot be started ({cause})."
            raise ShoalError("no-device", problem, "Every machine needs the same Python, shoal and Ray.") from error
        self.start_ref, self.start_failures = None, 0


class RayTransport:
    """One call of `train`: what the tasks have in common is put into the store once."""

    def __init__(
        self,
        workers: Sequence[RayWorker],
        stored_setups: Mapping[TrainingSetup, tuple[int, Any]],
        tasks: Sequence[Task],
        zero_copy_bytes: int,
    ):
        self.workers, self.stored_setups, self.place = workers, stored_setups, tasks[0].setup.net.place
        self.live_numbers = frozenset(number for number, _ in stored_setups.values())
        self.stored_tensors = store_common_tensors(tasks)
        self.last_start = monotonic()
        """When an actor was last known to have started."""
        self.actor_seconds = 0.0
        """Seconds that all actors together have spent on training."""
        self.zero_copy_bytes, self.zero_copy_arrays = zero_copy_bytes, list[weakref.ref[np.ndarray]]()
        """Bytes of results that may still be read in the store without a copy, and the arrays that were read so."""

    def is_ready(self, worker: RayWorker) -> bool:
        return worker.start_ref is None

    def send_chunk(self, worker: RayWorker, tasks: list[Task]) -> None:
        setups = {task.setup: self.stored_setups[task.setup] for task in tasks}
        content = [(setups[task.setup][0], task.job, task.memory) for task in tasks]
        packed = pickle_for_ray(content, lambda tensor: self.stored_tensors.get(id(tensor)))
        new = {number: ref for number, ref in setups.values() if number not in worker.known_setups}
        packed = packed._replace(shared_refs=[ref for ref in packed.shared_refs if ref != worker.shared_ref])
        worker.known_setups.update(new)
        worker.shared_ref = packed.shared_refs[0] if packed.shared_refs else worker.shared_ref
        worker.reply_refs.append(worker.actor.train.remote(packed, new, self.live_numbers))

    def wait(self, seconds: float) -> list[RayWorker]:
        """The workers that answered; raises where none could be started within START_TIMEOUT."""
        awaited = {worker.start_ref: worker for worker in self.workers if worker.start_ref}
        awaited |= {worker.reply_refs[0]: worker for worker in self.workers if worker.reply_refs}
        if not any(map(self.is_ready, self.workers)):
            seconds = min(seconds, self.last_start + START_TIMEOUT - monotonic())
        ready, _ = ray.wait(list(awaited), num_returns=1, timeout=None if seconds == inf else max(0.0, seconds))
        answered = [awaited[ref] for ref in ready if ref != awaited[ref].start_ref]
        for ref in ready:
            if ref == awaited[ref].start_ref:
                awaited[ref].check_start()
        if any(map(self.is_ready, self.workers)):
            self.last_start = monotonic()
        elif monotonic() - self.last_start >= START_TIMEOUT:
            problem = f"No worker of the Ray cluster could start in {START_TIMEOUT:g} s; others may hold all it has."
            raise ShoalError("no-device", problem, "See `ray status`, and wait for the others or add machines.")
        return answered

    def receive_reply(self, worker: RayWorker) -> TensorPickle | WorkerFailure | WorkerDeath:
        """The reply to the oldest chunk; an actor trains its chunks in order."""
        try:
            reply: Any = ray.get(worker.reply_refs[0], timeout=REPLY_TIMEOUT)
        except RayTaskError as error:
            reply = WorkerFailure(error.cause)
        except RayError as error:
            return WorkerDeath(f"died ({describe_error(error)})")
        worker.reply_refs.popleft()
        return reply

    def decode_reply(self, reply: TensorPickle | WorkerFailure) -> list[TaskResult] | WorkerFailure:
        """The results; their tensors lie in the store while there is room, those of devices' memories never do."""
        arrays, copy = [], False
        result: Any = reply
        if not isinstance(reply, WorkerFailure):
            arrays = [array for array in reply.tensors if isinstance(array, np.ndarray)]
            self.zero_copy_bytes -= sum(len(array) for array in arrays)
            copy = self.zero_copy_bytes < 0
            seconds, result = unpickle_with_tensors(reply, [], self.place, copy)
            self.actor_seconds += seconds
        if isinstance(result, WorkerFailure):
            for worker in self.workers:  # one of them may lack what it was sent
                worker.forget_references()
        elif not copy:
            self.zero_copy_arrays += map(weakref.ref, arrays)
            result = [one._replace(memory=tree.map_tensors(Tensor.clone, one.memory)) for one in result]
        return result

    def replace_worker(self, worker: RayWorker) -> list[TensorPickle | WorkerFailure]:
        """Start another actor; what the old one had answered before it was ended is not lost."""
        ray.kill(worker.actor)
        replies = []
        while worker.reply_refs and not isinstance(reply := self.receive_reply(worker), WorkerDeath):
            replies.append(reply)
        worker.start()
        return replies


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
