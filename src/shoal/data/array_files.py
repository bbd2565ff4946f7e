"""Arrays in files: NumPy's .npz, folders of .npy, and safetensors; the latter two are mapped, never read as a whole."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from shoal.core.errors import ShoalError, describe_error
from shoal.data.mapped import MappedTensors
from shoal.data.user_split import make_data_error
from shoal.storage.files import damaged_file_error, explain_disk_errors

ENTRIES = ("x", "y", "test_x", "test_y", "owners", "order")
LONG_NAMES = {"inputs": "x", "targets": "y", "test_inputs": "test_x", "test_targets": "test_y"}
LONG_NAMES |= {"x_train": "x", "y_train": "y", "x_test": "test_x", "y_test": "test_y"}
"""Other names for the entries, as Keras and this package have them."""
PIECE = 2**26
"""Bytes of an array that are looked at at a time."""
FORM = "Name the arrays x and y, and if wanted test_x, test_y, owners and order; x.NAME for one of several inputs."


def is_array_folder(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.npy"))


def read_array_file(path: Path) -> dict[str, Any]:
    """The arrays of an .npz file, of a .safetensors file or of a folder of .npy files, as a dict of x and y."""
    with explain_disk_errors(path):
        if path.is_dir():
            arrays = {file.stem: map_npy(file) for file in sorted(path.glob("*.npy"))}
            return MappedTensors(group_entries(arrays, path))
        if path.suffix == ".safetensors":
            return MappedTensors(group_entries(map_safetensors(path), path))
        return group_entries(read_npz(path), path)


def read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise make_data_error(f"{path} holds a single array.", "Save x and y with numpy.savez.")
            return {name: file[name] for name in file.files}
    except ShoalError:
        raise
    except Exception as error:
        raise pickled_array_error(path, error) from error


def map_npy(path: Path) -> np.ndarray:
    """An array that stays on the disk; what is written to it stays in memory."""
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:
        raise pickled_array_error(path, error) from error
    check_pieces(array, path, lambda start, end: np.load(path, mmap_mode="r")[start:end])
    return array


def check_pieces(array: Any, path: Path, read: Callable[[int, int], Any]) -> None:
    """Refuse values that are not finite in an array of floating point numbers; a piece at a time is in memory."""
    if not len(array.shape) or not array.shape[0] or "float" not in str(array.dtype):
        return
    rows = max(1, PIECE // max(1, array.nbytes // array.shape[0]))
    for start in range(0, array.shape[0], rows):
        piece = read(start, start + rows)
        piece = piece.float().numpy() if isinstance(piece, Tensor) and piece.element_size() < 4 else np.asarray(piece)
        if not np.isfinite(piece.sum()) and not np.isfinite(piece).all():
            odd = ~np.isfinite(piece).reshape(len(piece), -1)
            row = start + int(np.argmax(odd.any(axis=1)))
            raise make_data_error(
                f"{path} holds a value that is not a number or not finite in sample {row}.",
                "Replace it or drop the sample.",
            )


def pickled_array_error(path: Path, error: Exception) -> ShoalError:
    with open(path, "rb") as file:
        is_numpy = file.read(6).startswith((b"\x93NUMPY", b"PK\x03\x04"))
    if is_numpy and ("allow_pickle" in str(error) or "object" in str(error).lower()):
        return make_data_error(
            f"{path} holds Python objects, which may run programs when they are read.",
            "Save plain arrays of numbers: sequences of unequal length as lists in a Python file, texts as dtype str.",
        )
    return damaged_file_error(path, describe_error(error) if is_numpy else "it is no file of NumPy")


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped: safetensors keeps them on the disk until they are read."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            for name, tensor in tensors.items():
                check_pieces(tensor, path, lambda start, end: file.get_slice(name)[start:end])
            return tensors
    except ShoalError:
        raise
    except Exception as error:
        raise damaged_file_error(path, describe_error(error)) from error


def group_entries(arrays: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Arrays by the names that `build_user_dataset` knows; `x.NAME` are the inputs NAME of a dict."""
    entries: dict[str, Any] = {}
    for name, array in arrays.items():
        entry, _, part = name.partition(".")
        entry = LONG_NAMES.get(entry, entry)
        if entry not in ENTRIES or (part and not entry.endswith("x")) or (not part and entry in entries):
            raise make_data_error(f"{path} has an array {name[:40]!r}.", FORM)
        if part:
            inputs = entries.setdefault(entry, {})
            if not isinstance(inputs, dict):
                raise make_data_error(f"{path} has an array {name[:40]!r} beside {entry!r}.", FORM)
            inputs[part] = array
        else:
            entries[entry] = array
    for needed in ("x", "y") if "test_x" not in entries else ("x", "y", "test_y"):
        if needed not in entries:
            found = ", ".join(arrays)[:80] or "nothing"
            raise make_data_error(f"{path} has no array {needed!r}, only {found}.", FORM)
    return entries
