"""Memory that a process shares with its forks: objects are pickled, but their tensors are copied into the memory."""

import os
from array import array
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from mmap import PAGESIZE, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from shoal.engines.workers.tensor_pickle import ALIGNMENT, TensorPickler, TensorUnpickler, rebuild_tensor
from shoal.storage.files import explain_disk_errors


class SharedBuffer:
    """An anonymous file, mapped into the memory of two processes; one of them writes and the other reads, by turns.

    A process whose mapping is too short maps the file again. Tensors on the old mapping keep it alive, and see the same
    bytes.
    """

    def __init__(self):
        self.file, self.map = create_anonymous_file(), None
        self.end, self.sizes = 0, array("q")
        """How far the buffer is filled, and the bytes of each tensor in it."""
        finalize(self, os.close, self.file).atexit = False

    def write_object(self, content: Any) -> bytes:
        """A message about an object: the sizes of its tensors, which overwrite what the buffer held, and its pickle."""
        self.end, self.sizes, out = 0, array("q"), BytesIO()
        TensorPickler(out, self.write_tensor).dump(content)
        return b"".join((array("q", [len(self.sizes)]), self.sizes, out.getbuffer()))

    def read_object(self, message: bytes, copy: bool) -> Any:
        """The object. Without `copy` its tensors lie in the buffer: read-only, and valid until the next write."""
        (count,) = array("q", message[:8])
        start = 8 * (1 + count)
        buffers = self.iterate_buffers(array("q", message[8:start]))
        return TensorUnpickler(message[start:], buffers, partial(rebuild_tensor, copy=copy)).load()

    def write_tensor(self, tensor: Tensor) -> memoryview:
        """Copy a tensor behind those that the buffer has; the bytes that it takes up there."""
        start, size = self.end, tensor.nbytes
        self.sizes.append(size)
        self.end += align_size(size)
        if not size:
            return memoryview(b"")
        memory = self.map_up_to(start + size)
        place = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        place.view(tensor.shape).copy_(tensor.detach() if tensor.requires_grad else tensor)
        return memoryview(memory)[start : start + size]

    def iterate_buffers(self, sizes: array) -> Iterator[memoryview]:
        """The bytes of tensors of these sizes, which lie one behind the other."""
        start = 0
        for size in sizes:
            yield memoryview(self.map_up_to(start + size) if size else b"")[start : start + size]
            start += align_size(size)

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


def align_size(size: int) -> int:
    """Bytes that a tensor of so many takes up in a buffer."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


def create_anonymous_file() -> int:
    """The descriptor of a file without a name, in memory where the system can; it ends with the last process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal")
    with TemporaryFile() as file:
        return os.dup(file.fileno())
