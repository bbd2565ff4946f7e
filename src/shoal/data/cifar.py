"""The python batches of CIFAR-10 and CIFAR-100: pickles, read without ever running what they ask for."""

import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.download import LIMIT, find_data_file, read_bytes
from shoal.data.safe_unpickle import ArrayStandIn, SafeUnpickler
from shoal.storage.files import damaged_file_error, explain_disk_errors


def read_cifar10(folder: Path) -> Dataset:
    """60,000 colour images of 32 x 32 in 10 classes (A. Krizhevsky, 2009)."""
    train = [f"data_batch_{i}" for i in range(1, 6)]
    return read_cifar_batches(
        folder, "cifar10", "cifar-10-batches-py", "cifar-10-python.tar.gz", train, "test_batch", "labels", 10
    )


def read_cifar100(folder: Path) -> Dataset:
    """60,000 colour images of 32 x 32 in 100 fine classes (A. Krizhevsky, 2009)."""
    place = "cifar-100-python"
    return read_cifar_batches(folder, "cifar100", place, f"{place}.tar.gz", ["train"], "test", "fine_labels", 100)


def read_cifar_batches(
    folder: Path, name: str, place: str, archive: str, train: list[str], test: str, key: str, classes: int
) -> Dataset:
    """A set of batches from its folder, or from the archive as it is published."""
    wanted = [*train, test]
    if any((folder / place / file).is_file() for file in wanted):
        files = {file: read_bytes(find_data_file(folder / place, [file])) for file in wanted}
        where = folder / place
    else:
        where = find_data_file(folder, [archive])
        files = read_tar_members(where, place, wanted)
    halves = {file: decode_cifar_batch(content, where / file, key, classes) for file, content in files.items()}
    x, y = (torch.from_numpy(np.concatenate([halves[file][i] for file in train])) for i in (0, 1))
    test_x, test_y = map(torch.from_numpy, halves[test])
    return Dataset(name, x, y, test_x, test_y, classes)


def read_tar_members(path: Path, place: str, wanted: list[str]) -> dict[str, bytes]:
    """The wanted files of an archive, into memory. Nothing is unpacked to disk; links and other names are passed by."""
    contents: dict[str, bytes] = {}
    try:
        with explain_disk_errors(path), open(path, "rb") as file:
            stream: Any = LimitedStream(file)
            for member in (tar := tarfile.open(fileobj=stream, mode="r|")):
                top, _, name = member.name.removeprefix("./").partition("/")
                plain = member.isreg() and not member.issparse() and member.size <= LIMIT
                if plain and top == place and name in wanted and name not in contents:
                    content = tar.extractfile(member)
                    contents[name] = content.read() if content else b""
    except ShoalError:
        raise
    except Exception as error:
        raise damaged_file_error(path, error) from error
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise damaged_file_error(path, f"there is no {place}/{missing[0]} in it")
    return {name: contents[name] for name in wanted}


class LimitedStream:
    """A file as a stream without gzip that ends with an error after LIMIT bytes."""

    def __init__(self, file: Any):
        self.file = file
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self.unzip = zlib.decompressobj(31) if zipped else None
        self.total = 0

    def read(self, size: int) -> bytes:
        blocks: list[bytes] = []
        while size > 0 and (block := self._read_block(size)):
            blocks.append(block)
            size -= len(block)
            self.total += len(block)
            if self.total > LIMIT:
                raise ValueError(f"it unpacks to more than {LIMIT} bytes")
        return b"".join(blocks)

    def _read_block(self, size: int) -> bytes:
        if self.unzip is None:
            return self.file.read(size)
        while not self.unzip.eof:
            packed = self.unzip.unconsumed_tail or self.file.read(1 << 16)
            block = self.unzip.decompress(packed, size)
            if block:
                return block
            if not packed:
                raise EOFError("it is cut short")
        return b""


def decode_cifar_batch(content: bytes, path: Path, key: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels of one batch."""
    try:
        batch = SafeUnpickler(content).load()
    except Exception as error:
        raise damaged_file_error(path, error) from error
    if not isinstance(batch, dict):
        raise damaged_file_error(path, "it is not a table of images and labels")
    # what Python 2 wrote has bytes for names
    x, y = (batch.get(name.encode(), batch.get(name)) for name in ("data", key))
    if not isinstance(x, ArrayStandIn) or x.dtype != "u1" or len(x.shape) != 2 or x.shape[1] != 3072 or not x.shape[0]:
        raise damaged_file_error(path, "its 'data' are not rows of 3072 bytes")
    if isinstance(y, ArrayStandIn):
        y = y.to_numpy().tolist()
    if not isinstance(y, list) or len(y) != x.shape[0]:
        raise damaged_file_error(path, f"it has not got one of its {key!r} per image")
    if not all(type(label) is int and 0 <= label < classes for label in y):
        raise damaged_file_error(path, f"its {key!r} are not all whole numbers from 0 to {classes - 1}")
    return x.to_numpy().reshape(-1, 3, 32, 32), np.array(y, np.int64)
