"""Objects for Ray's object store: a small pickle and, beside it, the bytes of the tensors, to be read without a copy.

Tensors that are read without a copy are shared by all processes of a machine, and must never be written to.
"""

import pickle
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from ray.cloudpickle.cloudpickle import Pickler as CloudPickler
from torch import Tensor

MIN_ALIGNED_BYTES = 2048
"""Below this size the store does not begin a tensor at a multiple of 64 bytes: kernels may take another path then, and
round differently. Such tensors are copied when they are read."""

TensorBytes: TypeAlias = list[np.ndarray | bytes]
"""A block: the bytes of some tensors, which lie in the store as one object."""
FindStoredTensor: TypeAlias = Callable[[Tensor], tuple[Any, int] | None]
"""Where a tensor lies in the store already: the reference to a block, and its number in it; None if it does not."""


class TensorPlace(NamedTuple):
    """Where a tensor lies; it stands for the tensor in a pickle. Block 0 is the pickle's own, others are shared."""

    block: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    on_gpu: bool


class TensorPickle(NamedTuple):
    """A pickled object and its tensors."""

    pickled: bytes
    tensors: TensorBytes
    shared_refs: list[Any]
    """References to the blocks of tensors that lie in the store for several pickles."""


def pickle_with_tensors(content: Any, find_stored: FindStoredTensor = lambda tensor: None) -> TensorPickle:
    """Pickle an object; of tensors that lie in the store already (`find_stored`) only the place is kept."""
    out = BytesIO()
    writer = TensorPickler(out, find_stored)
    writer.dump(content)
    return TensorPickle(out.getvalue(), writer.tensors, list(writer.shared_refs))


def unpickle_with_tensors(
    packed: TensorPickle, blocks: Sequence[TensorBytes], gpu: torch.device | None = None, copy: bool = False
) -> Any:
    """The object, with the tensors of the blocks that it refers to; `gpu` is where tensors of a GPU go."""
    return TensorUnpickler(packed, blocks, gpu, copy).load()


def view_tensor_bytes(tensor: Tensor) -> np.ndarray | bytes:
    """The bytes of a tensor; of a large one without a copy, where it is contiguous and on the CPU."""
    array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array if len(array) >= MIN_ALIGNED_BYTES else array.tobytes()


class TensorPickler(CloudPickler):
    """Collects the tensors beside the pickle, once each. Closures are pickled too: setups hold data sets in them."""

    def __init__(self, out: BytesIO, find_stored: FindStoredTensor):
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.find_stored = find_stored
        self.tensors: TensorBytes = []
        self.shared_refs: dict[Any, int] = {}
        self.places: dict[int, tuple[Tensor, TensorPlace]] = {}

    def persistent_id(self, obj: Any) -> tuple | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.places:
            self.places[id(obj)] = (obj, self.place_tensor(obj))
        return tuple(self.places[id(obj)][1])

    def place_tensor(self, tensor: Tensor) -> TensorPlace:
        if stored := self.find_stored(tensor):
            ref, number = stored
            block = self.shared_refs.setdefault(ref, len(self.shared_refs) + 1)
        else:
            block, number = 0, len(self.tensors)
            self.tensors.append(view_tensor_bytes(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorPlace(block, number, dtype, tuple(tensor.shape), tensor.device.type != "cpu")


class TensorUnpickler(pickle.Unpickler):
    """Takes the tensors from their blocks; a tensor that occurs several times is one object again."""

    def __init__(self, packed: TensorPickle, blocks: Sequence[TensorBytes], gpu: torch.device | None, copy: bool):
        super().__init__(BytesIO(packed.pickled))
        self.refs, self.blocks, self.gpu, self.copy = [None, *packed.shared_refs], [packed.tensors, *blocks], gpu, copy
        self.own_tensors: dict[tuple[Any, int], Tensor] = {}
        self.shared_tensors: MutableMapping[tuple[Any, int], Tensor] = {}
        """Tensors of shared blocks that were read before."""

    def load(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that arrays of the store are read-only
            return super().load()

    def persistent_load(self, pid: tuple) -> Tensor:
        place = TensorPlace(*pid)
        key = (self.refs[place.block], place.number)
        cache = self.shared_tensors if place.block else self.own_tensors
        if key not in cache:
            cache[key] = tensor = self.build_tensor(place)
        else:
            tensor = cache[key]
        return tensor

    def build_tensor(self, place: TensorPlace) -> Tensor:
        array, dtype = self.blocks[place.block][place.number], getattr(torch, place.dtype)
        if not len(array):
            return torch.empty(place.shape, dtype=dtype, device=self.gpu if place.on_gpu else None)
        flat = torch.frombuffer(array, dtype=torch.uint8) if len(array) < MIN_ALIGNED_BYTES else torch.from_numpy(array)
        tensor = flat.view(dtype).view(place.shape)
        if place.on_gpu and self.gpu:
            return tensor.to(self.gpu)
        return tensor.clone() if self.copy or len(array) < MIN_ALIGNED_BYTES else tensor
