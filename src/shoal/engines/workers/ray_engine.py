"""The engine `ray`: actors of a Ray cluster, one for each processor or GPU, train chunks of a round's devices.

Large tensors of the training setups, above all the data set, lie in Ray's object store once, and actors read them
there; so do the tensors that a round sends to several devices. Results do not depend on which actor trains a device.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to nobody,
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # leaves the variables of GPUs alone,
os.environ.setdefault("RAY_worker_niceness", "0")  # lets its workers have a core like any process,
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # and does not print that a worker died: the engine logs it

import ray
from ray import cloudpickle

from shoal.core.errors import ShoalError, describe_error
from shoal.core.interrupts import keep_sigterm_handler
from shoal.core.local.device import TrainingSetup
from shoal.core.task import Engine, Task, TaskResult, estimate_steps
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.chunking import split_by_duration
from shoal.engines.workers.ray_actor import RayActor
from shoal.engines.workers.ray_pickle import pickle_for_ray
from shoal.engines.workers.ray_transport import RayTransport, RayWorker
from shoal.engines.workers.scheduler import ChunkScheduler, WorkerPolicy
from shoal.engines.workers.tensor_pickle import view_tensor_bytes

RAY_POLICY = WorkerPolicy(max_deaths=2, drops_devices=True, max_pending=2)
MIN_SHARED_BYTES = 1 << 16
"""Bytes from which a tensor of a training setup lies in the store by itself, for all setups that have it."""


class RayEngine:
    """Trains on the cluster at `address`, or without one on a Ray of its own on this machine.

    Each actor has the engine that `make_engine` builds, which trains `width` devices in one call; chunks have a
    multiple of that many. A chunk that takes longer than `task_timeout` seconds per device is taken for hung.
    """

    def __init__(
        self,
        address: str = "",
        make_engine: Callable[[], Engine] = SerialEngine,
        width: int = 1,
        task_timeout: float = 600.0,
        workers: int = 0,
    ):
        self.address, self.make_engine, self.width = address, make_engine, width
        self.task_timeout, self.workers = task_timeout, workers
        self.actors: list[RayWorker] = []
        self.max_actors = 1
        """How many actors the cluster has room for."""
        self.stored_setups: WeakKeyDictionary[TrainingSetup, tuple[int, Any]] = WeakKeyDictionary()
        """The number of each training setup and its reference in the store, which keeps it there."""
        self.tensor_refs = WeakTensorKeyDictionary()
        """The references of the setups' large tensors in the store."""
        self.free_numbers = count()
        self.seconds_per_step = 0.0
        """Mean seconds of a local step in the last call of `train`; 0 before the first."""
        self.owns_ray = False
        """Whether this engine called ray.init, and must call ray.shutdown."""
        self.zero_copy_bytes = 0
        """Bytes of results that may be read in the store without a copy."""
        self.zero_copy_arrays: list[ref[np.ndarray]] = []
        """The arrays of the last results that were read so; they should be gone by the next call."""

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        if not tasks:
            return []
        try:
            self.start_actors(len(tasks), tasks[0].setup.net.place.type == "cuda")
            for setup in dict.fromkeys(task.setup for task in tasks):
                self.store_setup(setup)
            if any(array() is not None for array in self.zero_copy_arrays):
                self.zero_copy_bytes = 0  # results are kept for longer than a round: the store would fill up with them
            transport = RayTransport(self.actors, self.stored_setups, tasks, self.zero_copy_bytes)
            steps = [estimate_steps(task) for task in tasks]
            chunks = split_by_duration(steps, self.seconds_per_step, len(self.actors), self.width)
            policy = replace(RAY_POLICY, seconds_per_device=self.task_timeout)
            scheduler = ChunkScheduler(tasks, chunks, transport, policy)
            scheduler.run_chunks()
        except BaseException:
            self.close()  # actors must not go on with what they are training
            raise
        results = scheduler.get_results()
        self.seconds_per_step = transport.actor_seconds / max(1.0, sum(steps))
        self.zero_copy_arrays = transport.zero_copy_arrays
        return results

    def close(self) -> None:
        """End the actors and leave the cluster; another `train` starts them again."""
        if ray.is_initialized():
            for worker in self.actors:
                ray.kill(worker.actor)
        self.actors.clear()
        self.stored_setups.clear()
        self.tensor_refs.clear()
        if self.owns_ray:
            ray.shutdown()
            self.owns_ray = False

    def start_actors(self, tasks: int, on_gpu: bool) -> None:
        """Start as many actors as there are processors or GPUs, but no more than there are tasks."""
        if not ray.is_initialized():
            join_cluster(self.address)
            self.owns_ray = True
        if not self.actors:
            self.zero_copy_bytes = int(ray.cluster_resources().get("object_store_memory", 0) / len(ray.nodes()) / 4)
        if len(self.actors) >= min(tasks, self.max_actors):
            return
        kind = "GPU" if on_gpu else "CPU"
        available = int(ray.cluster_resources().get(kind, 0))
        if not available:
            advice = "Use --compute cpu." if on_gpu else "Start a worker: ray start --address=HOST:6379."
            raise ShoalError("no-device", f"The Ray cluster has no {kind}.", advice)
        actor_class = ray.remote(num_cpus=1, num_gpus=int(on_gpu), max_restarts=0, max_task_retries=0)(RayActor)
        self.max_actors = min(available, self.workers or available)
        for _ in range(len(self.actors), min(self.max_actors, tasks)):
            self.actors.append(RayWorker(lambda: actor_class.remote(self.make_engine, on_gpu)))

    def store_setup(self, setup: TrainingSetup) -> None:
        """Put a training setup into the store, if it is not there yet."""
        if setup in self.stored_setups:
            return
        files = {}
        for name, module in list(sys.modules.items()):
            if name.startswith("shoal_file_"):  # a user's own file, which no other machine has
                files[name] = module.__file__
                cloudpickle.register_pickle_by_value(module)
        setup.net.reset_slots()  # what the last call left in the template stays here
        self.stored_setups[setup] = (
            next(self.free_numbers),
            ray.put(pickle_for_ray((setup, files), self.store_large_tensor)),
        )

    def store_large_tensor(self, tensor: Tensor) -> tuple[Any, int] | None:
        """Where a large tensor lies in the store; it is put there at the first call. None for a small one."""
        if tensor.nbytes < MIN_SHARED_BYTES:
            return None
        if tensor not in self.tensor_refs:
            self.tensor_refs[tensor] = ray.put([view_tensor_bytes(tensor)])
        return self.tensor_refs[tensor], 0


def join_cluster(address: str) -> None:
    """Join a cluster; without an address, start Ray on this machine with all its cores. Ray keeps quiet about it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local: dict[str, Any] = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    options: dict[str, Any] = {"address": address} if address else local
    try:
        check_cluster_address(address)
        with keep_sigterm_handler():
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        failure = (
            f"There is no Ray cluster that can be joined at {address!r}" if address else "Ray could not be started"
        )
        hint = "Start one with `ray start --head`, and check its address, token and certificates"
        advice = f"{hint}; without an address Ray starts here." if address else "Use --engine pool."
        raise ShoalError("no-device", f"{failure} ({describe_error(error)}).", advice) from error


def check_cluster_address(address: str) -> None:
    """Raise at once where nothing listens at the address: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
