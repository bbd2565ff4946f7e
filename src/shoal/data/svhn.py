"""SVHN: colour images of house numbers in MATLAB files (Y. Netzer and others, 2011).

The arrays of a MATLAB 5 file are read here rather than with scipy, whose reader can bring the process down on a damaged
file. The format: MathWorks, MAT-File Format, chapter 1.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.download import LIMIT, find_data_file, read_bytes
from shoal.storage.files import damaged_file_error

TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
MATRIX, COMPRESSED = 14, 15
NUMBERS = range(6, 16)
"""Classes of arrays that are double, single or whole numbers."""


def read_svhn(folder: Path) -> Dataset:
    """The cropped digits: `train_32x32.mat` and `test_32x32.mat`."""
    train, test = (find_data_file(folder, [f"{half}_32x32.mat"]) for half in ("train", "test"))
    return Dataset("svhn", *decode_svhn(read_bytes(train), train), *decode_svhn(read_bytes(test), test), classes=10)


def decode_svhn(content: bytes, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images `X` (32, 32, 3, N), turned to (N, 3, 32, 32), and labels `y`, where 10 means the digit 0."""
    try:
        arrays = read_mat_arrays(content)
    except (ValueError, struct.error, zlib.error) as error:
        raise damaged_file_error(path, error) from error
    x, y = arrays.get("X"), arrays.get("y")
    if x is None or x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3) or not x.size:
        raise damaged_file_error(path, "its 'X' are not colour images of 32 x 32 bytes")
    if y is None or y.size != y.shape[0] or len(y) != x.shape[3]:
        raise damaged_file_error(path, "its 'y' is not one label per image")
    if not np.isin(y, np.arange(11)).all():
        raise damaged_file_error(path, "its labels are not all whole numbers from 1 to 10")
    labels = y.reshape(-1).astype(np.int64) % 10
    return torch.from_numpy(x.transpose(3, 2, 0, 1).copy()), torch.from_numpy(labels)


def read_mat_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays `X` and `y` of a MATLAB 5 file."""
    if len(content) < 128 or content[124:128] != b"\x00\x01IM":
        raise ValueError("it is not a MATLAB 5 file")
    arrays: dict[str, np.ndarray] = {}
    left = LIMIT
    for kind, body in iterate_mat_elements(memoryview(content)[128:], padded=False):
        if kind == COMPRESSED:
            unzip = zlib.decompressobj()
            body = memoryview(unzip.decompress(body, left))
            left -= len(body)
            if not unzip.eof or left <= 0:
                raise ValueError("a part of it is cut short or far too large")
            kind, body = next(iterate_mat_elements(body), (0, body))
        if kind == MATRIX:
            arrays.update(read_mat_matrix(body))
    return arrays


def iterate_mat_elements(content: memoryview, padded: bool = True) -> Iterator[tuple[int, memoryview]]:
    """The type and the bytes of each element; short ones share their first eight bytes with their head."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from("<II", content, at)
        if kind >> 16:
            kind, size, start, following = kind & 0xFFFF, kind >> 16, at + 4, at + 8
            if size > 4:
                raise ValueError("a short element of it is too long")
        else:
            start = at + 8
            # elements are filled up to eight bytes, but for compressed ones
            following = start + (size if kind == COMPRESSED or not padded else -(-size // 8) * 8)
        if start + size > len(content):
            raise ValueError("it is cut short")
        yield kind, content[start : start + size]
        at = following


def read_mat_matrix(content: memoryview) -> dict[str, np.ndarray]:
    """An array with its name; nothing for what is not wanted."""
    parts = iterate_mat_elements(content)
    heads = [next(parts, (0, content[:0])) for _ in range(3)]
    (_, flags), (_, dims), (_, name) = heads
    word = bytes(name).decode("latin-1")
    if word not in ("X", "y"):
        return {}
    kind, values = next(parts, (0, content[:0]))
    mark = struct.unpack_from("<I", flags)[0]
    if mark & 0xFF not in NUMBERS or mark & 0x800 or kind not in TYPES or len(dims) % 4 or not 8 <= len(dims) <= 32:
        raise ValueError(f"its {word!r} is not an array of numbers")
    shape = struct.unpack(f"<{len(dims) // 4}i", dims)
    dtype = np.dtype(TYPES[kind])
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"the size of its {word!r} does not fit its bytes")
    return {word: np.frombuffer(values, dtype).reshape(shape, order="F")}
