"""The user's cache folder, for what can be made again: trials of engines, built kernels, traced and compiled steps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def find_cache_folder() -> Path:
    """Where shoal keeps what a later run may find again; nothing is lost with it but time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Inside, no other process that waits for this file is inside; where there are no locks, nothing is waited for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
