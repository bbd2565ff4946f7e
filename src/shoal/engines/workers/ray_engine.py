"""The machines of a Ray cluster: an actor for each processor or GPU trains chunks of a round's devices.

What sites hold in common, above all the data set, lies in Ray's object store once, and actors read it there; so do the
tensors that a round sends to more than one chunk. Who trains a device changes nothing about it.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to nobody,
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # leaves the variables of GPUs alone,
os.environ.setdefault("RAY_worker_niceness", "0")  # lets its workers have a core like any process,
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # and does not print that a worker died: the engine tells it

import ray
from ray import cloudpickle

from shoal.core.errors import ShoalError, describe_error
from shoal.core.interrupts import keep_sigterm_handler
from shoal.core.local.device import TrainingSetup
from shoal.engines.base import Task, TaskResult, TrainingEngine
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.ray_actor import RayActor
from shoal.engines.workers.ray_handle import RayActorHandle
from shoal.engines.workers.ray_scheduler import RayScheduler
from shoal.engines.workers.tensor_pickle import pickle_with_tensors, view_tensor_bytes

MIN_SHARED_BYTES = 1 << 16
"""Bytes from which a tensor of a site lies in the store by itself, for all sites that have it."""


class RayEngine:
    """Trains on a cluster, or on a Ray of its own on this machine, with a crew in each actor.

    A job that takes longer than `patience` seconds is taken for hung. The crew trains `lanes` devices in one call;
    chunks have so many, or a multiple of it, that to send them costs little.
    """

    def __init__(
        self,
        address: str = "",
        inner: Callable[[], TrainingEngine] = SerialEngine,
        lanes: int = 1,
        patience: float = 600.0,
        workers: int = 0,
    ):
        self.address, self.inner, self.lanes = address, inner, lanes
        self.patience, self.workers = patience, workers
        self.hands: list[RayActorHandle] = []
        self.most = 1
        """Actors that the cluster has room for."""
        self.sites: WeakKeyDictionary[TrainingSetup, tuple[int, Any]] = WeakKeyDictionary()
        """What a site is called on the way, and where it lies; what lies there stays for as long as it is listed."""
        self.tensors = WeakTensorKeyDictionary()
        """Where the large tensors of sites lie."""
        self.unused = count()
        self.pace = 0.0
        """The seconds that a step took when devices were last trained."""
        self.owner = False
        """Whether Ray was started or joined here, and is to be left here."""
        self.room = 0
        """Bytes of answers that may be read where they lie in the store, without a copy."""
        self.lent: list[ref[np.ndarray]] = []
        """Where the last answers were read so; they should be gone by the next call."""

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]:
        if not tasks:
            return []
        try:
            self.start_actors(len(tasks), tasks[0].setup.net.place.type == "cuda")
            for site in dict.fromkeys(task.setup for task in tasks):
                self.store_setup(site)
            if any(array() is not None for array in self.lent):
                self.room = 0  # somebody keeps answers for longer: the store would fill up with them
            shift = RayScheduler(self.hands, self.sites, tasks, self.lanes, self.patience, self.pace, self.room)
            shift.run_chunks()
        except BaseException:
            self.close()  # whoever is in the middle of something must not go on with it
            raise
        if shift.failed:
            raise shift.failed[min(shift.failed)]
        self.pace, self.lent = shift.seconds_per_step, shift.lent
        return [shift.done[i] for i in range(len(tasks))]

    def close(self) -> None:
        """End the actors and leave the cluster; another `train` comes back."""
        if ray.is_initialized():
            for hand in self.hands:
                ray.kill(hand.actor)
        self.hands.clear()
        self.sites.clear()
        self.tensors.clear()
        if self.owner:
            ray.shutdown()
            self.owner = False

    def start_actors(self, tasks: int, on_gpu: bool) -> None:
        """As many actors as there are processors or GPUs, and no more than there are tasks."""
        if not ray.is_initialized():
            join_cluster(self.address)
            self.owner = True
        if not self.hands:
            self.room = int(ray.cluster_resources().get("object_store_memory", 0) / len(ray.nodes()) / 4)
        if len(self.hands) >= min(tasks, self.most):
            return
        kind = "GPU" if on_gpu else "CPU"
        there = int(ray.cluster_resources().get(kind, 0))
        if not there:
            advice = "Use --compute cpu." if on_gpu else "Start a worker: ray start --address=HOST:6379."
            raise ShoalError("no-device", f"The Ray cluster has no {kind}.", advice)
        one = ray.remote(num_cpus=1, num_gpus=int(on_gpu), max_restarts=0, max_task_retries=0)(RayActor)
        self.most = min(there, self.workers or there)
        for _ in range(len(self.hands), min(self.most, tasks)):
            self.hands.append(RayActorHandle(lambda: one.remote(self.inner, on_gpu)))

    def store_setup(self, site: TrainingSetup) -> None:
        """Put a site into the store, if it is not there yet."""
        if site in self.sites:
            return
        files = {}
        for name, module in list(sys.modules.items()):
            if name.startswith("shoal_file_"):  # a user's own file, which no other machine has
                files[name] = module.__file__
                cloudpickle.register_pickle_by_value(module)
        site.net._fill_slots(site.net.initial, training=False)  # what the last call left in the template stays here
        self.sites[site] = (next(self.unused), ray.put(pickle_with_tensors((site, files), self.store_large_tensor)))

    def store_large_tensor(self, tensor: Tensor) -> tuple[Any, int] | None:
        """Where a large tensor lies; it is put there when it is first met."""
        if tensor.nbytes < MIN_SHARED_BYTES:
            return None
        if tensor not in self.tensors:
            self.tensors[tensor] = ray.put([view_tensor_bytes(tensor)])
        return self.tensors[tensor], 0


def join_cluster(address: str) -> None:
    """Join a cluster; without an address, start Ray on this machine with all its cores. Ray keeps quiet about it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own: dict[str, Any] = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    where: dict[str, Any] = {"address": address} if address else own
    try:
        check_cluster_address(address)
        with keep_sigterm_handler():
            ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        found = f"There is no Ray cluster that can be joined at {address!r}" if address else "Ray could not be started"
        start = "Start one with `ray start --head`, and check its address, token and certificates"
        advice = f"{start}; without an address Ray starts here." if address else "Use --engine pool."
        raise ShoalError("no-device", f"{found} ({describe_error(error)}).", advice) from error


def check_cluster_address(address: str) -> None:
    """Where nobody listens, Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
