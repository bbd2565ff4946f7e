"""Settings of glibc's malloc for processes that train."""

import ctypes
from contextlib import suppress
from time import monotonic

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
TRIM_SECONDS = 5.0
"""How often the pages of freed memory are given back; to have them again takes some milliseconds."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: large gradients would otherwise cause page faults at every step."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.mallopt(MMAP_THRESHOLD, 1 << 30) or libc.mallopt(MMAP_THRESHOLD, 32 << 20):  # older ones take no more
            libc.mallopt(TRIM_THRESHOLD, 1 << 30)


class FreedMemory:
    """Gives the pages of freed memory back now and then.

    A small object that stays, such as the row numbers of a device that trains for the first time, may be put where a
    large tensor was. The next tensor of that size does not fit there any more, so that with every round more memory
    would be kept and never used.
    """

    def __init__(self):
        self.last_trim = monotonic()

    def trim_if_due(self) -> None:
        if monotonic() - self.last_trim >= TRIM_SECONDS:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            self.last_trim = monotonic()
