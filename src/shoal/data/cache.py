"""A cache of decoded data sets: plain arrays on disk, mapped into memory when they are used again."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from shoal.core.model.inputs import Inputs, count_samples
from shoal.data.dataset import Dataset

VERSION = 1
"""Counted up when a reader changes what it makes of the same files."""

STORED_FORM = 2
"""Of what is stored; another one makes the cache anew."""
OWNERS = ("owners", "test_owners", "order")
"""Fields with a number for each sample, where the data have them."""
ARRAYS = ("inputs", "targets", "test_inputs", "test_targets")


def load_cached_dataset(root: Path, name: str, files: Iterable[Path], read: Callable[[], Dataset]) -> Dataset:
    """The data set from its cached arrays below `root`, or read with `read` and stored there.

    Cached arrays belong to files of one size and age. Damaged ones are made again; where nothing can be written, the
    data set is used from memory.
    """
    folder = root / ".arrays" / f"{name.split(':')[0]}-{hash_data_files(name, files)}"
    dataset = read_stored_dataset(folder)
    if dataset is not None:
        return dataset
    dataset = read()
    try:
        store_dataset(dataset, folder)
    except OSError:
        return dataset
    return read_stored_dataset(folder) or dataset


def hash_data_files(name: str, files: Iterable[Path]) -> str:
    """A hash of the name and of the sizes and ages of the files; a folder stands for all files in it."""
    marks = [f"{VERSION}, form {STORED_FORM}: {name}"]
    for path in files:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.exists():
                stat = file.stat()
                marks.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()[:16]


def store_dataset(dataset: Dataset, folder: Path) -> None:
    """Written to a temporary folder and renamed, so that it is there as a whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        arrays: dict[str, np.ndarray] = {}
        for field in ARRAYS:
            arrays |= {name: tensor.numpy() for name, tensor in name_tensors(field, getattr(dataset, field))}
        arrays |= {field: own for field in OWNERS if (own := getattr(dataset, field)) is not None}
        for field, array in arrays.items():
            np.save(temporary / make_file_name(field), array, allow_pickle=False)
        shapes = {field: [str(array.dtype), list(array.shape)] for field, array in arrays.items()}
        about = {"name": dataset.name, "classes": dataset.classes, "arrays": shapes}
        about |= {
            key: getattr(dataset, key) for key in ("task", "class_names", "mapped", "remarks") if getattr(dataset, key)
        }
        (temporary / "about.json").write_text(json.dumps(about), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_stored_dataset(folder: Path) -> Dataset | None:
    """The data set in such a folder, or None where it is missing or damaged.

    The arrays are mapped copy-on-write: torch takes them as they are, and what is written to them stays in memory.
    """
    try:
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        arrays: dict[str, np.ndarray] = {}
        for field, (dtype, shape) in about["arrays"].items():
            array = np.load(folder / make_file_name(field), mmap_mode="c", allow_pickle=False)
            if [str(array.dtype), list(array.shape)] != [dtype, shape]:
                return None
            arrays[field] = array
        name, classes = str(about["name"]), int(about["classes"])
        halves = [gather_tensors(field, arrays) for field in ARRAYS]
        for inputs, targets in (halves[:2], halves[2:]):
            if not 0 < count_samples(inputs) == len(targets):
                return None
            if targets.dtype == torch.int64 and (targets.min() < 0 or targets.max() >= classes):
                return None
        (x, y), (test_x, test_y) = halves[:2], halves[2:]
        return Dataset(
            name,
            x,
            y,
            test_x,
            test_y,
            classes,
            arrays.get("owners"),
            str(about.get("task", "")),
            tuple(about.get("class_names", ())),
            arrays.get("order"),
            bool(about.get("mapped")),
            tuple(about.get("remarks", ())),
            arrays.get("test_owners"),
        )
    except Exception:  # a cache that cannot be read, for whatever reason, is made again
        return None


def name_tensors(field: str, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """The tensors of inputs with a name each: `inputs`, or `inputs.NAME` of a dict, or `inputs:0` of a tuple."""
    if isinstance(inputs, Tensor):
        return [(field, inputs)]
    if isinstance(inputs, dict):
        return [(f"{field}.{name}", tensor) for name, tensor in inputs.items()]
    return [(f"{field}:{i}", tensor) for i, tensor in enumerate(inputs)]


def gather_tensors(field: str, arrays: dict[str, np.ndarray]) -> Inputs:
    """The inputs that `name_tensors` has named."""
    if field in arrays:
        return torch.from_numpy(arrays[field])
    places = [array for name, array in arrays.items() if name.startswith(f"{field}:")]
    if places:
        return tuple(map(torch.from_numpy, places))
    start = f"{field}."
    return {name[len(start) :]: torch.from_numpy(own) for name, own in arrays.items() if name.startswith(start)}


def make_file_name(array: str) -> str:
    """The file of an array, whatever characters the name of a user's input has."""
    return f"{quote(array, safe='')}.npy"
