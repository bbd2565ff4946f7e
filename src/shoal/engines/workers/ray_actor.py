"""What an actor of a Ray cluster does: hold one processor or GPU for as long as it lives, and train what it is sent."""

import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import ray
import torch
from torch import Tensor

from shoal.core.local.device import TrainingSetup
from shoal.engines.base import Task, TrainingEngine
from shoal.engines.workers.fork_worker import WorkerFailure, make_portable_error
from shoal.engines.workers.malloc import keep_freed_memory
from shoal.engines.workers.tensor_pickle import TensorBytes, TensorPickle, TensorUnpickler, pickle_with_tensors


class RayActor:
    """One thread and one crew. Sites are fetched when they are first needed, and let go with the one who sent them."""

    def __init__(self, inner: Callable[[], TrainingEngine], on_gpu: bool):
        torch.set_num_threads(1)
        keep_freed_memory()
        self.crew, self.gpu = inner(), torch.device("cuda", 0) if on_gpu else None
        self.sites: dict[int, TrainingSetup] = {}
        self.data: WeakValueDictionary[tuple[Any, int], Tensor] = WeakValueDictionary()
        """Tensors that several sites may share."""
        self.box: TensorBytes = []
        """The tensors that are common to the devices of a round."""

    def ready(self) -> None:
        """Answered as soon as the actor is there."""

    def train(self, order: TensorPickle, sites: Mapping[int, Any], live: frozenset[int]) -> TensorPickle:
        """Tasks in; out come the seconds that it took, and outcomes and memories, or what went wrong."""
        began = perf_counter()
        try:
            for gone in self.sites.keys() - live:
                del self.sites[gone]
            for number in sites.keys() - self.sites.keys():
                self.sites[number] = self.load_setup(ray.get(sites[number]))
            if order.shared:
                self.box = ray.get(order.shared[0])
            found = TensorUnpickler(order._replace(shared=["box"]), [self.box], self.gpu, copy=False).load()
            tasks = [Task(self.sites[number], job, memory) for number, job, memory in found]
            found = self.crew.train(tasks)
        except BaseException as error:
            found = WorkerFailure(make_portable_error(error, self.sites.values()))
        return pickle_with_tensors((perf_counter() - began, found))

    def load_setup(self, crate: TensorPickle) -> TrainingSetup:
        reader = TensorUnpickler(crate, ray.get(crate.shared), self.gpu, copy=False)
        reader.known = self.data
        site, files = reader.load()
        for name, file in files.items():  # there is no such module here, but who is to blame is found by its file
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__file__ = file
        return site
