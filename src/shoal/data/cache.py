"""A cache of decoded data sets: plain arrays on disk, mapped into memory when they are used again."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from shoal.data.dataset import Dataset

VERSION = 1
"""Counted up when a reader changes what it makes of the same files."""

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
    marks = [f"{VERSION} {name}"]
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
        arrays = {field: getattr(dataset, field).numpy() for field in ARRAYS}
        if dataset.owners is not None:
            arrays["owners"] = dataset.owners
        for field, array in arrays.items():
            np.save(temporary / f"{field}.npy", array, allow_pickle=False)
        shapes = {field: [str(array.dtype), list(array.shape)] for field, array in arrays.items()}
        about = {"name": dataset.name, "classes": dataset.classes, "arrays": shapes}
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
            array = np.load(folder / f"{field}.npy", mmap_mode="c", allow_pickle=False)
            if [str(array.dtype), list(array.shape)] != [dtype, shape]:
                return None
            arrays[field] = array
        name, classes = str(about["name"]), int(about["classes"])
        halves = [torch.from_numpy(arrays[field]) for field in ARRAYS]
        for inputs, targets in (halves[:2], halves[2:]):
            if not 0 < len(inputs) == len(targets) or targets.min() < 0 or targets.max() >= classes:
                return None
        return Dataset(name, *halves, classes=classes, owners=arrays.get("owners"))
    except Exception:  # a cache that cannot be read, for whatever reason, is made again
        return None
