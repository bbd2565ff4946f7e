"""Atomic, durable writing of files: neither a kill nor a power cut leaves a half-written file in place of a whole one.

A file is written under a temporary name, synced, and renamed; the rename is on disk when its folder is synced. What a
kill leaves of a temporary file is removed when its folder is next opened.
"""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such lock, and does not remove a file that somebody has open
    fcntl = None

TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
"""Names of temporary files: a dot, the final name, the process id, `.tmp`."""


class Disk:
    """The file system operations that writing needs; tests replace it by one that forgets what was not synced."""

    def create(self, path: Path) -> IO[bytes]:
        return open(path, "wb")

    def open_to_append(self, path: Path) -> IO[bytes]:
        """An existing file, opened to append; it is not created, since its earlier content would be missing."""
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)), "ab")

    def write(self, path: Path, file: IO[bytes], content: bytes) -> None:
        file.write(content)
        file.flush()

    def sync(self, path: Path) -> None:
        """Sync the content of a file, or the entries of a folder, to disk."""
        if os.name == "nt" and path.is_dir():
            return  # Windows syncs no folders
        number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)


disk = Disk()


def replace_file(
    path: Path, content: bytes, sync_folder: bool = True, confirm: Callable[[], None] | None = None
) -> None:
    """Write a file under a temporary name and rename it, so that the old file stays until the new one is complete.

    Without `sync_folder` the caller has to sync the folder. `confirm` is called before the rename, and may raise.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk.create(temporary) as file:
            lock_file(file)
            disk.write(temporary, file, content)
            disk.sync(temporary)
            if confirm:
                confirm()
            disk.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            disk.remove(temporary)
        raise
    if sync_folder:
        disk.sync(path.parent)


def append_to_file(path: Path, content: bytes) -> None:
    """Append to an existing file; the content is safe from a power cut when the file is synced."""
    with disk.open_to_append(path) as file:
        disk.write(path, file, content)


def sync_paths(paths: Iterable[Path]) -> None:
    """Sync the content of files and the entries of folders to disk."""
    for path in paths:
        disk.sync(path)


def remove_file(path: Path) -> None:
    """Remove a file if it exists; without a sync of its folder a power cut may bring it back."""
    disk.remove(path)


def make_folders(path: Path, inside: Path | None = None) -> set[Path]:
    """Create the missing folders of a path (below `inside`); returns the folders that have to be synced."""
    missing = []
    while path != inside and not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        disk.make_folder(folder)
    return {folder.parent for folder in missing}


def remove_strays(folder: Path) -> None:
    """Remove temporary files whose writers have died; files that are being written are locked, and stay."""
    for path in folder.glob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name) and path.is_file() and not is_locked(path):
            disk.remove(path)


def lock_file(file: IO[bytes]) -> None:
    """Lock a file, to show other processes that its writer is alive."""
    if fcntl:
        with suppress(OSError):  # a file system without locks: then its files are never taken for strays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a file, or may hold it."""
    if not fcntl:
        return False
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
