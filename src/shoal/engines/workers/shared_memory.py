"""Memory that a process shares with its forks: objects are pickled, but their tensors are copied into the memory."""

import os
from array import array
from collections.abc import Iterator
from enum import Enum
from functools import partial
from io import BytesIO
from itertools import accumulate
from mmap import PAGESIZE, mmap
from pathlib import Path
from struct import Struct
from tempfile import TemporaryFile
from typing import Any
from weakref import finalize, ref

import numpy as np
import torch
from torch import Tensor

from shoal.engines.workers.tensor_pickle import ALIGNMENT, StackPickler, TensorUnpickler, rebuild_tensor
from shoal.storage.files import explain_disk_errors

MESSAGE = Struct("qqq")
"""Where the sizes of an object's tensors and its pickle lie in a buffer, how many sizes there are, and the length."""


class SharedBuffer:
    """An anonymous file, mapped into the memory of two processes; one of them writes and the other reads, by turns.

    A process whose mapping is too short maps the file again. Tensors on the old mapping keep it alive, and see the same
    bytes.
    """

    def __init__(self):
        self.file, self.map = create_anonymous_file(), None
        self.end, self.sizes = 0, array("q")
        """How far the buffer is filled, and the bytes of each tensor in it."""
        self.reader: ref[np.ndarray] | None = None
        """What the tensors that were last read without a copy lie on; it lives as long as one of them does."""
        finalize(self, os.close, self.file).atexit = False

    @property
    def is_read(self) -> bool:
        """Whether there are tensors in this process that lie in the buffer, so that it must not be written to."""
        return self.reader is not None and self.reader() is not None

    def write_object(self, content: Any, most_rows: int = 0) -> bytes:
        """Write an object over what the buffer held: its tensors, their sizes, its pickle. The message says where.

        Of tensors that are rows of a stack of at most `most_rows` rows, the whole stack is written, once.
        """
        self.end, self.sizes, out = 0, array("q"), BytesIO()
        StackPickler(out, self.write_tensor, most_rows).dump(content)
        text = self.sizes.tobytes() + out.getbuffer()
        self.map_up_to(self.end + len(text))[self.end : self.end + len(text)] = text
        return MESSAGE.pack(self.end, len(self.sizes), len(text))

    def read_object(self, message: bytes, copy: bool) -> Any:
        """The object. Without `copy` its tensors lie in the buffer, and are valid until the next write."""
        start, count, length = MESSAGE.unpack(message)
        text = self.map_up_to(start + length)[start : start + length]
        buffers = self.iterate_buffers(array("q", text[: 8 * count]), copy)
        return TensorUnpickler(text[8 * count :], buffers, partial(rebuild_tensor, copy=copy)).load()

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

    def iterate_buffers(self, sizes: array, copy: bool) -> Iterator[np.ndarray]:
        """The bytes of tensors of these sizes, which lie one behind the other; without `copy` they have a reader."""
        starts = [0, *accumulate(map(align_size, sizes))]
        end = max((start + size for start, size in zip(starts, sizes) if size), default=0)
        memory = np.frombuffer(self.map_up_to(end) if end else b"", np.uint8)
        if not copy and end:
            self.reader = ref(memory)
        for start, size in zip(starts, sizes):
            yield memory[start : start + size]

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


class ReplyState(Enum):
    """What a buffer for replies is in use for."""

    FREE = "for nothing"
    ASKED = "for a reply that was asked for and has not come"
    UNREAD = "for a reply that has come and has not been read"
    READ = "for the tensors of a reply that was read without a copy"


class ReplyBuffer(SharedBuffer):
    """A buffer that another process writes its replies to: free, asked, unread, and then read or free again."""

    def __init__(self):
        super().__init__()
        self.phase = ReplyState.FREE
        """The state but for READ, which begins and ends with the tensors."""

    @property
    def state(self) -> ReplyState:
        return ReplyState.READ if self.is_read else self.phase

    def ask_reply(self) -> None:
        """Note that the other process is told to write a reply to the buffer."""
        assert self.state is ReplyState.FREE, self.state
        self.phase = ReplyState.ASKED

    def accept_reply(self) -> None:
        """Note that the reply has come."""
        assert self.state is ReplyState.ASKED, self.state
        self.phase = ReplyState.UNREAD

    def read_object(self, message: bytes, copy: bool) -> Any:
        """The reply, once: `reader` could not tell of a second one whether its tensors are in use."""
        assert self.state is ReplyState.UNREAD, self.state
        self.phase = ReplyState.FREE
        return super().read_object(message, copy)

    def drop_reply(self, state: ReplyState) -> None:
        """Free the buffer where it is in that state: its reply will not come, or nobody will read it."""
        if self.phase is state:
            self.phase = ReplyState.FREE


def align_size(size: int) -> int:
    """Bytes that a tensor of so many takes up in a buffer."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


def create_anonymous_file() -> int:
    """The descriptor of a file without a name, in memory where the system can; it ends with the last process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal")
    with TemporaryFile() as file:
        return os.dup(file.fileno())
