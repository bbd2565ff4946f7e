"""SVHN: colour images of house numbers in MATLAB files (Y. Netzer and others, 2011)."""

import io
import warnings
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.download import LIMIT, pick, read_bytes
from shoal.files import damaged


def read(folder: Path) -> Dataset:
    """The cropped digits: `train_32x32.mat` and `test_32x32.mat`."""
    train, test = (pick(folder, [f"{half}_32x32.mat"]) for half in ("train", "test"))
    return Dataset("svhn", *decode(read_bytes(train), train), *decode(read_bytes(test), test), classes=10)


def decode(content: bytes, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images `X` (32, 32, 3, N), turned to (N, 3, 32, 32), and labels `y`, where 10 means the digit 0."""
    try:
        from scipy.io import loadmat, matlab, whosmat
    except ImportError as error:
        raise ShoalError(
            "missing-extra", "SVHN is read with scipy, which is not installed.", "Run pip install 'shoal[data]'."
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if matlab.matfile_version(io.BytesIO(content))[0] != 1:
                raise ValueError("it is not a MATLAB 5 file")
            # what was announced is looked at first, because room is made for it before it is read
            for name, shape, kind in whosmat(io.BytesIO(content)):
                if name not in ("X", "y"):
                    continue
                if kind not in ("uint8", "double") or not 0 < int(np.prod(shape, dtype=object)) < LIMIT // 8:
                    raise ValueError(f"its {name!r} is not an array of numbers of a reasonable size")
            found = loadmat(io.BytesIO(content), variable_names=("X", "y"))
        x, y = found["X"], found["y"]
    except Exception as error:
        raise damaged(path, error) from error
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise damaged(path, "its 'X' are not colour images of 32 x 32 bytes")
    if not isinstance(y, np.ndarray) or y.dtype.kind not in "uif" or y.size != y.shape[0] or len(y) != x.shape[3]:
        raise damaged(path, "its 'y' is not one label per image")
    if not np.isin(y, np.arange(11)).all():
        raise damaged(path, "its labels are not all whole numbers from 1 to 10")
    labels = y.reshape(-1).astype(np.int64) % 10
    return torch.from_numpy(np.ascontiguousarray(x.transpose(3, 2, 0, 1))), torch.from_numpy(labels)
