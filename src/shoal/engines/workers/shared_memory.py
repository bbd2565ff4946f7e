"""Memory that a process shares with its forks: objects are pickled, but their tensors are copied into the memory."""

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
"""Tensors begin at multiples of this many bytes, like those that torch allocates: otherwise kernels may take another
path, and round differently."""


class TensorOffset(NamedTuple):
    """Where a tensor lies in a shared buffer; it stands for the tensor in a pickle."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SharedBuffer:
    """An anonymous file, mapped into the memory of two processes; one of them writes and the other reads, by turns.

    A process whose mapping is too short maps the file again. Tensors on the old mapping keep it alive, and see the same
    bytes.
    """

    def __init__(self):
        self.file, self.map, self.end = create_anonymous_file(), None, 0
        finalize(self, os.close, self.file).atexit = False

    def write_object(self, content: Any) -> bytes:
        """The pickle of an object without its tensors; those overwrite what the buffer held before."""
        self.end, out = 0, BytesIO()
        SharedPickler(out, self).dump(content)
        return out.getvalue()

    def read_object(self, pickled: bytes, copy: bool) -> Any:
        """The object. Without `copy` its tensors lie in the buffer: read-only, and valid until the next write."""
        return SharedUnpickler(BytesIO(pickled), self, copy).load()

    def put_tensor(self, tensor: Tensor) -> TensorOffset:
        place = TensorOffset(self.end, tensor.dtype, tuple(tensor.shape))
        self.end += max(1, -(-tensor.nbytes // ALIGNMENT)) * ALIGNMENT
        self.view_tensor(place).copy_(tensor.detach())
        return place

    def view_tensor(self, place: TensorOffset) -> Tensor:
        """The tensor at a place, without a copy."""
        offset, dtype, shape = place
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        memory = self.map_up_to(offset + count * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)

    def map_up_to(self, end: int) -> mmap:
        """The mapping, with at least `end` bytes; the file is enlarged where it is shorter."""
        if self.map is None or len(self.map) < end:
            with explain_disk_errors(Path("shared memory")):
                size = os.fstat(self.file).st_size
                if size < end:
                    new_size = -(-max(end, size + size // 2) // PAGESIZE) * PAGESIZE
                    os.posix_fallocate(self.file, size, new_size - size)
                    size = new_size
                self.map = mmap(self.file, size)
        return self.map


class SharedPickler(pickle.Pickler):
    """Copies every tensor into a shared buffer, once however often it occurs."""

    def __init__(self, out: BytesIO, buffer: SharedBuffer):
        super().__init__(out, pickle.HIGHEST_PROTOCOL)
        self.buffer = buffer
        self.written: dict[int, tuple[Tensor, TensorOffset]] = {}

    def persistent_id(self, obj: Any) -> tuple | None:
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.written:
            self.written[id(obj)] = (obj, self.buffer.put_tensor(obj))
        return tuple(self.written[id(obj)][1])


class SharedUnpickler(pickle.Unpickler):
    """Takes the tensors from a shared buffer; a tensor that occurs several times is one object again."""

    def __init__(self, pickled: BytesIO, buffer: SharedBuffer, copy: bool):
        super().__init__(pickled)
        self.buffer, self.copy = buffer, copy
        self.loaded: dict[int, Tensor] = {}

    def persistent_load(self, pid: tuple) -> Tensor:
        place = TensorOffset(*pid)
        if place.offset not in self.loaded:
            tensor = self.buffer.view_tensor(place)
            self.loaded[place.offset] = tensor.clone() if self.copy else tensor
        return self.loaded[place.offset]


def create_anonymous_file() -> int:
    """The descriptor of a file without a name, in memory where the system can; it ends with the last process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal")
    with TemporaryFile() as file:
        return os.dup(file.fileno())
