"""How this process gets its memory."""

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Where there is glibc, let it keep what is freed: large gradients otherwise fault in page by page at each step."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.mallopt(MMAP_THRESHOLD, 1 << 30) or libc.mallopt(MMAP_THRESHOLD, 32 << 20):  # older ones take no more
            libc.mallopt(TRIM_THRESHOLD, 1 << 30)
