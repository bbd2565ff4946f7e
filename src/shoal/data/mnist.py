"""Readers for the idx format of MNIST and Fashion-MNIST: a magic number, the sizes, then bytes; plain or in gzip."""

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.download import LIMIT, find_data_file, read_bytes
from shoal.storage.files import damaged_file_error


def read_mnist(folder: Path, name: str = "mnist", classes: int = 10) -> Dataset:
    """The four files of MNIST or of a set in its format."""
    halves = []
    for half in ("train", "t10k"):
        images, labels = (
            find_data_file(folder, (f"{half}-{what}", f"{half}-{what}.gz"))
            for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        x, y = decode_idx(read_bytes(images), images, 3), decode_idx(read_bytes(labels), labels, 1)
        halves += pair_images_labels(x, y, images, labels, classes)
    if halves[0].shape[1:] != halves[2].shape[1:]:
        raise damaged_file_error(folder, "training and test images differ in size")
    return Dataset(name, *halves, classes=classes)


def pair_images_labels(
    x: np.ndarray, y: np.ndarray, images: Path, labels: Path, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels that belong together, as tensors."""
    if x.size == 0:
        raise damaged_file_error(images, "it holds no images")
    if len(x) != len(y):
        raise damaged_file_error(labels, f"{len(y)} labels for {len(x)} images")
    if y.max() >= classes:
        raise damaged_file_error(labels, f"label {y.max()} where {classes - 1} is the largest")
    return torch.from_numpy(x[:, None]), torch.from_numpy(y.astype(np.int64))


def decode_idx(content: bytes, path: Path, dims: int) -> np.ndarray:
    """The array of bytes in an idx file with this number of dimensions."""
    content = gunzip_limited(content, path)
    if len(content) < 4 + 4 * dims:
        raise damaged_file_error(path, "it is cut short")
    if content[:4] != bytes((0, 0, 8, dims)):
        raise damaged_file_error(path, f"its magic number is {content[:4].hex()}, not 000008{dims:02d}")
    shape = struct.unpack(f">{dims}I", content[4 : 4 + 4 * dims])
    if len(content) != 4 + 4 * dims + math.prod(shape):
        raise damaged_file_error(path, f"{len(content)} bytes, but {'x'.join(map(str, shape))} values were announced")
    # a bytearray may be written to, so that torch takes the array as it is
    return np.frombuffer(bytearray(content[4 + 4 * dims :]), np.uint8).reshape(shape)


def gunzip_limited(content: bytes, path: Path, limit: int = LIMIT) -> bytes:
    """The content without gzip, where it has it; never more than the limit."""
    if content[:2] != b"\x1f\x8b":
        return content
    unzip = zlib.decompressobj(31)
    try:
        plain = unzip.decompress(content, limit)
    except zlib.error as error:
        raise damaged_file_error(path, error) from error
    if unzip.unconsumed_tail:
        raise damaged_file_error(path, f"it unpacks to more than {limit} bytes")
    if not unzip.eof:
        raise damaged_file_error(path, "it is cut short")
    return plain
