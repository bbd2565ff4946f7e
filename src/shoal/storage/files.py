"""Reading and writing of whole files and of trees of tensors (safetensors, no pickle), with errors for users."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.tree import Tree, pack_tree, unpack_tree
from shoal.storage.durable import make_folders, replace_file, sync_paths


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
    return save(tensors, {"shoal": json.dumps(plain)})


def write_tree(path: Path, tree: Tree) -> None:
    """Write a tree as a safetensors file."""
    write_bytes(path, tree_as_bytes(tree))


def read_tree(path: Path) -> Tree:
    """The tree in a file that `write_tree` wrote; a "damaged" error for any other file."""
    try:
        with explain_disk_errors(path), safe_open(path, framework="pt") as file:
            plain: Any = json.loads((file.metadata() or {})["shoal"])
            return unpack_tree(plain, {k: file.get_tensor(k) for k in file.keys()})
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
        reason = error.strerror or str(error)
        raise ShoalError(
            "disk",
            f"{path} could not be written or read: {reason}.",
            "Make room or allow access; the run can be resumed.",
        ) from error
