"""Settings of glibc's malloc for processes that train."""

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Let glibc keep freed memory: large gradients would otherwise cause page faults at every step."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.mallopt(MMAP_THRESHOLD, 1 << 30) or libc.mallopt(MMAP_THRESHOLD, 32 << 20):  # older ones take no more
            libc.mallopt(TRIM_THRESHOLD, 1 << 30)
