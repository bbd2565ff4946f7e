"""The actor of a Ray cluster: it holds one processor or GPU for as long as it lives, and trains what it is sent."""

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
from shoal.core.task import Engine, Task
from shoal.engines.workers.fork_worker import make_portable_error
from shoal.engines.workers.malloc import keep_freed_memory
from shoal.engines.workers.ray_pickle import pickle_for_ray
from shoal.engines.workers.scheduler import WorkerFailure
from shoal.engines.workers.tensor_pickle import TensorBytes, TensorPickle, unpickle_with_tensors


class RayActor:
    """One thread and one engine. Setups are fetched when they are first needed, and dropped when the driver has."""

    def __init__(self, make_engine: Callable[[], Engine], on_gpu: bool):
        torch.set_num_threads(1)
        keep_freed_memory()
        self.engine, self.gpu = make_engine(), torch.device("cuda", 0) if on_gpu else None
        self.setups: dict[int, TrainingSetup] = {}
        self.shared_tensors: WeakValueDictionary[tuple[Any, int], Tensor] = WeakValueDictionary()
        """Tensors that several setups may share, by reference and number: data sets above all."""
        self.round_tensors: TensorBytes = []
        """The tensors that several devices of the round are sent, such as the global model."""

    def ready(self) -> None:
        """Do nothing: the driver waits for its end to know that the actor has started."""

    def train(
        self, packed_tasks: TensorPickle, setup_refs: Mapping[int, Any], live_numbers: frozenset[int]
    ) -> TensorPickle:
        """Train tasks; the seconds that it took, and a list of TaskResult or a WorkerFailure, pickled.

        `setup_refs` has the setups that the actor lacks; those not in `live_numbers` are dropped.
        """
        start = perf_counter()
        try:
            for number in self.setups.keys() - live_numbers:
                del self.setups[number]
            for number in setup_refs.keys() - self.setups.keys():
                self.setups[number] = self.load_setup(ray.get(setup_refs[number]))
            if packed_tasks.shared_refs:
                self.round_tensors = ray.get(packed_tasks.shared_refs[0])
            packed_tasks = packed_tasks._replace(shared_refs=["the round's"])
            content = unpickle_with_tensors(packed_tasks, [self.round_tensors], self.gpu)
            tasks = [Task(self.setups[number], job, memory) for number, job, memory in content]
            content = self.engine.train(tasks)
        except BaseException as error:
            content = WorkerFailure(make_portable_error(error, self.setups.values()))
        return pickle_for_ray((perf_counter() - start, content))

    def load_setup(self, packed_setup: TensorPickle) -> TrainingSetup:
        blocks = ray.get(packed_setup.shared_refs)
        setup, files = unpickle_with_tensors(packed_setup, blocks, self.gpu, known=self.shared_tensors)
        for name, file in files.items():  # the module does not exist here, but a part to blame is found by its file
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__file__ = file
        return setup
