"""Pickles for Ray's object store, with closures and lambdas: training setups hold data sets in them."""

from functools import partial
from typing import Any

from ray.cloudpickle.cloudpickle import Pickler as CloudPickler
from torch import Tensor

from shoal.engines.workers.tensor_pickle import TensorPickler, pickle_with_tensors


class ClosurePickler(TensorPickler, CloudPickler):
    """Pickles closures as cloudpickle does, and tensors as TensorPickler does."""

    def reducer_override(self, obj: Any) -> Any:
        pickler = TensorPickler if isinstance(obj, Tensor) else CloudPickler
        return pickler.reducer_override(self, obj)


pickle_for_ray = partial(pickle_with_tensors, pickler=ClosurePickler)
