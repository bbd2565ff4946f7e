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
from shoal.engines.base import Crew, Task
from shoal.engines.workers.fork_worker import Failure, portable
from shoal.engines.workers.malloc import keep_memory
from shoal.engines.workers.tensor_pickle import Box, Crate, Reader, packed


class Trainer:
    """One thread and one crew. Sites are fetched when they are first needed, and let go with the one who sent them."""

    def __init__(self, inner: Callable[[], Crew], on_gpu: bool):
        torch.set_num_threads(1)
        keep_memory()
        self.crew, self.gpu = inner(), torch.device("cuda", 0) if on_gpu else None
        self.sites: dict[int, TrainingSetup] = {}
        self.data: WeakValueDictionary[tuple[Any, int], Tensor] = WeakValueDictionary()
        """Tensors that several sites may share."""
        self.box: Box = []
        """The tensors that are common to the devices of a round."""

    def ready(self) -> None:
        """Answered as soon as the actor is there."""

    def train(self, order: Crate, sites: Mapping[int, Any], live: frozenset[int]) -> Crate:
        """Tasks in; out come the seconds that it took, and outcomes and memories, or what went wrong."""
        began = perf_counter()
        try:
            for gone in self.sites.keys() - live:
                del self.sites[gone]
            for number in sites.keys() - self.sites.keys():
                self.sites[number] = self.site(ray.get(sites[number]))
            if order.shared:
                self.box = ray.get(order.shared[0])
            found = Reader(order._replace(shared=["box"]), [self.box], self.gpu, copy=False).load()
            tasks = [Task(self.sites[number], job, memory) for number, job, memory in found]
            found = self.crew.train(tasks)
        except BaseException as error:
            found = Failure(portable(error, self.sites.values()))
        return packed((perf_counter() - began, found))

    def site(self, crate: Crate) -> TrainingSetup:
        reader = Reader(crate, ray.get(crate.shared), self.gpu, copy=False)
        reader.known = self.data
        site, files = reader.load()
        for name, file in files.items():  # there is no such module here, but who is to blame is found by its file
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__file__ = file
        return site
