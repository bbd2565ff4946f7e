"""Memory that a process shares with its forks: trees go through it without their tensors being pickled.

An exception has to go the same way, and takes the places that it came through along.
"""

import os
import pickle
from io import BytesIO
from math import prod
from mmap import PAGESIZE, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from shoal.storage.files import explain_disk_errors

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, as those that torch allocates do: kernels may take another path
otherwise, and round differently."""


class TensorOffset(NamedTuple):
    """Where a tensor lies in an arena; this is what stands for it in a pickle."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SharedBuffer:
    """A file without a name, mapped into memory; one side writes and the other reads, by turns.

    Whoever finds its mapping too short maps the file anew. Tensors on the old mapping hold on to it, and see the same
    bytes as before.
    """

    def __init__(self):
        self.file, self.map, self.end = create_anonymous_file(), None, 0
        finalize(self, os.close, self.file).atexit = False

    def write_object(self, thing: Any) -> bytes:
        """The small pickle of a thing whose tensors are now in the arena, in place of what was there before."""
        self.end, out = 0, BytesIO()
        SharedPickler(out, self).dump(thing)
        return out.getvalue()

    def read_object(self, pickled: bytes, copy: bool) -> Any:
        """The thing again. Without `copy` its tensors are the arena's own: never written to, and gone by its turn."""
        return SharedUnpickler(BytesIO(pickled), self, copy).load()

    def put_tensor(self, tensor: Tensor) -> TensorOffset:
        place = TensorOffset(self.end, tensor.dtype, tuple(tensor.shape))
        self.end += max(1, -(-tensor.nbytes // ALIGNMENT)) * ALIGNMENT
        self.view_tensor(place).copy_(tensor.detach())
        return place

    def view_tensor(self, place: TensorOffset) -> Tensor:
        """The tensor at a place, on the arena itself."""
        offset, dtype, shape = place
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        bytes = self.map_up_to(offset + count * dtype.itemsize)
        return torch.frombuffer(bytes, dtype=dtype, count=count, offset=offset).view(shape)

    def map_up_to(self, end: int) -> mmap:
        """The mapping, made long enough."""
        if self.map is None or len(self.map) < end:
            with explain_disk_errors(Path("shared memory")):
                size = os.fstat(self.file).st_size
                if size < end:
                    more = -(-max(end, size + size // 2) // PAGESIZE) * PAGESIZE
                    os.posix_fallocate(self.file, size, more - size)
                    size = more
                self.map = mmap(self.file, size)
        return self.map


class SharedPickler(pickle.Pickler):
    """Puts every tensor into an arena, once however often it is met."""

    def __init__(self, out: BytesIO, arena: SharedBuffer):
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self.arena = arena
        self.met: dict[int, tuple[Tensor, TensorOffset]] = {}

    def persistent_id(self, obj: Any) -> tuple | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.met:
            self.met[id(obj)] = (obj, self.arena.put_tensor(obj))
        return tuple(self.met[id(obj)][1])


class SharedUnpickler(pickle.Unpickler):
    """Takes the tensors from an arena; what was one tensor is one again."""

    def __init__(self, pickled: BytesIO, arena: SharedBuffer, copy: bool):
        super().__init__(pickled)
        self.arena, self.copy = arena, copy
        self.met: dict[int, Tensor] = {}

    def persistent_load(self, pid: tuple) -> Tensor:
        place = TensorOffset(*pid)
        if place.offset not in self.met:
            tensor = self.arena.view_tensor(place)
            self.met[place.offset] = tensor.clone() if self.copy else tensor
        return self.met[place.offset]


def create_anonymous_file() -> int:
    """A file in memory, where the system has such, that ends with the last process that holds it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal")
    with TemporaryFile() as file:
        return os.dup(file.fileno())
