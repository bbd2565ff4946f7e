"""What goes through Ray's object store: a small pickle, and beside it the tensors, which nobody copies to read them.

Tensors that are read without a copy are shared by all who read them: they are never written to.
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
"""Below so many bytes the store does not begin a tensor at a multiple of 64: kernels may take another path then, and
round differently. Such tensors are copied when they are read."""

TensorBytes: TypeAlias = list[np.ndarray | bytes]
"""The bytes of tensors."""
FindStoredTensor: TypeAlias = Callable[[Tensor], tuple[Any, int] | None]
"""Where a tensor lies already: a reference to a box in the store, and its number in there."""


class TensorPlace(NamedTuple):
    """Where a tensor lies; this is what stands for it in a pickle."""

    box: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    gpu: bool


class TensorPickle(NamedTuple):
    """A thing on its way."""

    pickled: bytes
    own: TensorBytes
    shared: list[Any]
    """References to the boxes of tensors that other crates need as well."""


def pickle_with_tensors(thing: Any, elsewhere: FindStoredTensor = lambda tensor: None) -> TensorPickle:
    """A crate with a thing in it; of tensors that lie elsewhere only the place."""
    out = BytesIO()
    writer = TensorPickler(out, elsewhere)
    writer.dump(thing)
    return TensorPickle(out.getvalue(), writer.own, list(writer.shared))


def unpickle_with_tensors(
    crate: TensorPickle, boxes: Sequence[TensorBytes], gpu: torch.device | None = None, copy: bool = False
) -> Any:
    """The thing again, with what lies in the boxes that it refers to."""
    return TensorUnpickler(crate, boxes, gpu, copy).load()


def view_tensor_bytes(tensor: Tensor) -> np.ndarray | bytes:
    """The bytes of a tensor; of a large one in its own memory, wherever that is possible."""
    bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes if len(bytes) >= MIN_ALIGNED_BYTES else bytes.tobytes()


class TensorPickler(CloudPickler):
    """Puts every tensor into a box, once however often it is met. Closures are pickled too: data sets lie in them."""

    def __init__(self, out: BytesIO, elsewhere: FindStoredTensor):
        super().__init__(out, protocol=pickle.HIGHEST_PROTOCOL)
        self.elsewhere = elsewhere
        self.own: TensorBytes = []
        self.shared: dict[Any, int] = {}
        self.met: dict[int, tuple[Tensor, TensorPlace]] = {}

    def persistent_id(self, obj: Any) -> tuple | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.met:
            self.met[id(obj)] = (obj, self.place_tensor(obj))
        return tuple(self.met[id(obj)][1])

    def place_tensor(self, tensor: Tensor) -> TensorPlace:
        if found := self.elsewhere(tensor):
            ref, number = found
            box = self.shared.setdefault(ref, len(self.shared) + 1)
        else:
            box, number = 0, len(self.own)
            self.own.append(view_tensor_bytes(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorPlace(box, number, dtype, tuple(tensor.shape), tensor.device.type != "cpu")


class TensorUnpickler(pickle.Unpickler):
    """Takes the tensors from their boxes; what was one tensor is one again, and what was on a GPU is on one."""

    def __init__(self, crate: TensorPickle, boxes: Sequence[TensorBytes], gpu: torch.device | None, copy: bool):
        super().__init__(BytesIO(crate.pickled))
        self.refs, self.boxes, self.gpu, self.copy = [None, *crate.shared], [crate.own, *boxes], gpu, copy
        self.met: dict[tuple[Any, int], Tensor] = {}
        self.known: MutableMapping[tuple[Any, int], Tensor] = {}
        """Tensors of shared boxes that were read before."""

    def load(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that what lies in the store is not to be written to
            return super().load()

    def persistent_load(self, pid: tuple) -> Tensor:
        place = TensorPlace(*pid)
        key = (self.refs[place.box], place.number)
        met = self.known if place.box else self.met
        if key not in met:
            met[key] = tensor = self.build_tensor(place)
        else:
            tensor = met[key]
        return tensor

    def build_tensor(self, place: TensorPlace) -> Tensor:
        found, dtype = self.boxes[place.box][place.number], getattr(torch, place.dtype)
        if not len(found):
            return torch.empty(place.shape, dtype=dtype, device=self.gpu if place.gpu else None)
        bytes = (
            torch.frombuffer(found, dtype=torch.uint8) if len(found) < MIN_ALIGNED_BYTES else torch.from_numpy(found)
        )
        tensor = bytes.view(dtype).view(place.shape)
        if place.gpu and self.gpu:
            return tensor.to(self.gpu)
        return tensor.clone() if self.copy or len(found) < MIN_ALIGNED_BYTES else tensor
