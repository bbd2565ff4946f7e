"""Reading and writing of whole files and of trees of tensors (safetensors, no pickle), with errors for users."""

import errno
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.tree import Tree, pack_tree, unpack_tree
from shoal.storage.durable import make_folders, replace_file, sync_paths

CHECKSUM = "crc32"
"""The tensor of a tree's file that tells damage, down to a single bit; all others have numbers for names."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and durably; missing folders are created."""
    with explain_disk_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        sync_paths(make_folders(path.parent))
        replace_file(path, content)


def tree_as_bytes(tree: Tree) -> bytes:
    """A tree as the bytes of a safetensors file; structure and plain values go into its header as JSON."""
    plain, flat = pack_tree(tree)
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in flat.items()}
    description = json.dumps(plain)
    tensors[CHECKSUM] = torch.tensor(compute_tree_checksum(description, tensors))
    return save(tensors, {"shoal": description})


def compute_tree_checksum(description: str, tensors: dict[str, Tensor]) -> int:
    """The CRC-32 of a tree's description, and of the shapes, types and bytes of its tensors."""
    checksum = zlib.crc32(description.encode())
    for name, value in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), checksum)
        checksum = zlib.crc32(value.flatten().view(torch.uint8).numpy().data, checksum)
    return checksum


def write_tree(path: Path, tree: Tree) -> None:
    """Write a tree as a safetensors file."""
    write_bytes(path, tree_as_bytes(tree))


def read_tree(path: Path) -> Tree:
    """The tree in a file that `write_tree` wrote; a "damaged" error for any other file."""
    try:
        with explain_disk_errors(path), safe_open(path, framework="pt") as file:
            description = (file.metadata() or {})["shoal"]
            tensors = {k: file.get_tensor(k) for k in file.keys()}
        checksum = tensors.pop(CHECKSUM, None)  # files of former versions have none
        if checksum is not None and checksum.tolist() != compute_tree_checksum(description, tensors):
            raise ValueError("its contents are not those that were written")
        return unpack_tree(json.loads(description), tensors)
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise damaged_file_error(path, error) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of any safetensors file, by name."""
    try:
        with explain_disk_errors(path), safe_open(path, framework="pt") as file:
            return {k: file.get_tensor(k) for k in file.keys()}
    except (SafetensorError, ValueError) as error:
        raise damaged_file_error(path, error) from error


def damaged_file_error(path: Path, why: object) -> ShoalError:
    reason = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    return ShoalError(
        "damaged",
        f"{path} is damaged or is not what its name says ({reason[:120]}).",
        "Remove it or restore it from a copy.",
    )


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Inside, an OSError (disk full, no permission, ...) becomes a "disk" error that names the path."""
    try:
        yield
    except OSError as error:
        raise make_disk_error(path, error, "Make room or allow access; the run can be resumed.") from error


@contextmanager
def explain_path_errors() -> Iterator[None]:
    """Inside, an OSError about a path, such as one with a name that is too long, becomes a "disk" error."""
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str):
            raise
        raise make_disk_error(error.filename, error, "Check the path, make room or allow access.") from error


def make_disk_error(path: Path | str, error: OSError, advice: str) -> ShoalError:
    return ShoalError("disk", f"{path} could not be written or read: {error.strerror or error}.", advice)
