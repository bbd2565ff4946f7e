"""The python batches of CIFAR-10 and CIFAR-100: pickles, read without ever running what they ask for."""

import codecs
import io
import math
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.download import LIMIT, pick, read_bytes
from shoal.files import damaged, disk_errors


def cifar10(folder: Path) -> Dataset:
    """60,000 colour images of 32 x 32 in 10 classes (A. Krizhevsky, 2009)."""
    train = [f"data_batch_{i}" for i in range(1, 6)]
    return read(folder, "cifar10", "cifar-10-batches-py", "cifar-10-python.tar.gz", train, "test_batch", "labels", 10)


def cifar100(folder: Path) -> Dataset:
    """60,000 colour images of 32 x 32 in 100 fine classes (A. Krizhevsky, 2009)."""
    place = "cifar-100-python"
    return read(folder, "cifar100", place, f"{place}.tar.gz", ["train"], "test", "fine_labels", 100)


def read(
    folder: Path, name: str, place: str, archive: str, train: list[str], test: str, key: str, classes: int
) -> Dataset:
    """A set of batches from its folder, or from the archive as it is published."""
    wanted = [*train, test]
    if any((folder / place / file).is_file() for file in wanted):
        files = {file: read_bytes(pick(folder / place, [file])) for file in wanted}
        where = folder / place
    else:
        where = pick(folder, [archive])
        files = from_tar(where, place, wanted)
    halves = {file: decode(content, where / file, key, classes) for file, content in files.items()}
    x, y = (torch.from_numpy(np.concatenate([halves[file][i] for file in train])) for i in (0, 1))
    test_x, test_y = map(torch.from_numpy, halves[test])
    return Dataset(name, x, y, test_x, test_y, classes)


def from_tar(path: Path, place: str, wanted: list[str]) -> dict[str, bytes]:
    """The wanted files of an archive, into memory. Nothing is unpacked to disk; links and other names are passed by."""
    found: dict[str, bytes] = {}
    try:
        with disk_errors(path), open(path, "rb") as file:
            stream: Any = Plain(file)
            for member in (tar := tarfile.open(fileobj=stream, mode="r|")):
                top, _, name = member.name.removeprefix("./").partition("/")
                plain = member.isreg() and not member.issparse() and member.size <= LIMIT
                if plain and top == place and name in wanted and name not in found:
                    content = tar.extractfile(member)
                    found[name] = content.read() if content else b""
    except ShoalError:
        raise
    except Exception as error:
        raise damaged(path, error) from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise damaged(path, f"there is no {place}/{missing[0]} in it")
    return {name: found[name] for name in wanted}


class Plain:
    """A file as a stream without gzip that ends with an error after LIMIT bytes."""

    def __init__(self, file: Any):
        self.file = file
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self.unzip = zlib.decompressobj(31) if zipped else None
        self.total = 0

    def read(self, size: int) -> bytes:
        blocks: list[bytes] = []
        while size > 0 and (block := self._some(size)):
            blocks.append(block)
            size -= len(block)
            self.total += len(block)
            if self.total > LIMIT:
                raise ValueError(f"it unpacks to more than {LIMIT} bytes")
        return b"".join(blocks)

    def _some(self, size: int) -> bytes:
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


def decode(content: bytes, path: Path, key: str, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 32, 32) and labels of one batch."""
    try:
        batch = Unpickler(content).load()
    except Exception as error:
        raise damaged(path, error) from error
    if not isinstance(batch, dict):
        raise damaged(path, "it is not a table of images and labels")
    # what Python 2 wrote has bytes for names
    x, y = (batch.get(name.encode(), batch.get(name)) for name in ("data", key))
    if not isinstance(x, Array) or x.dtype != "u1" or len(x.shape) != 2 or x.shape[1] != 3072 or not x.shape[0]:
        raise damaged(path, "its 'data' are not rows of 3072 bytes")
    if isinstance(y, Array):
        y = y.value().tolist()
    if not isinstance(y, list) or len(y) != x.shape[0]:
        raise damaged(path, f"it has not got one of its {key!r} per image")
    if not all(type(label) is int and 0 <= label < classes for label in y):
        raise damaged(path, f"its {key!r} are not all whole numbers from 0 to {classes - 1}")
    return x.value().reshape(-1, 3, 32, 32), np.array(y, np.int64)


class Array:
    """What stands for a numpy array while a pickle is read: shape, type and bytes, checked against each other."""

    def __init__(self):
        self.shape: tuple[int, ...] = (0,)
        self.dtype = "u1"
        self.fortran = False
        self.content = b""

    def fill(self, shape: Any, dtype: Any, fortran: Any, content: Any) -> None:
        if not isinstance(dtype, Type) or not isinstance(content, bytes) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array in it is not made of plain numbers")
        if not len(shape) <= 4 or not all(type(n) is int and 0 <= n <= LIMIT for n in shape):
            raise pickle.UnpicklingError("an array in it has an impossible shape")
        if math.prod(shape) * int(dtype.code[1:]) != len(content):
            raise pickle.UnpicklingError("the shape of an array in it does not fit its bytes")
        self.shape, self.dtype, self.content = shape, dtype.code, content
        self.fortran = bool(fortran)

    def value(self) -> np.ndarray:
        kind = np.dtype("<" + self.dtype)
        return np.frombuffer(bytearray(self.content), kind).reshape(self.shape, order="F" if self.fortran else "C")


class Type:
    """What stands for a numpy type: bytes or little-endian whole numbers."""

    def __init__(self, code: Any):
        code = code.decode("latin-1") if isinstance(code, bytes) else code
        if code not in ("u1", "i1", "i2", "i4", "i8"):
            raise pickle.UnpicklingError("an array in it is not made of bytes or whole numbers")
        self.code: str = code


class Global:
    """A name that a pickle may call: it stands for numpy's function and makes only the classes above."""

    __slots__ = ("make",)

    def __init__(self, make: Any):
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


KEPT = (
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE"
)


_Slow: Any = pickle._Unpickler
"""The one in Python: the one in C makes room for any number that a pickle names."""


class Unpickler(_Slow):
    """Reads plain containers and numpy arrays, and nothing else.

    No name in a pickle is ever looked up: the few that arrays need are answered by the stand-ins above, and everything
    that could make an object, take memory by announcing it, or hash a nested key is not among the known commands.
    """

    dispatch: dict[int, Any] = {
        code: _Slow.dispatch[code] for code in (getattr(pickle, name)[0] for name in KEPT.split())
    }

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.budget = len(content)
        known = {"ndarray": self.refuse, "dtype": lambda code, *_: Type(code)}
        self.known = {("numpy", name): Global(make) for name, make in known.items()}
        self.known["_codecs", "encode"] = Global(self.encode)
        for core in ("core", "_core"):
            self.known[f"numpy.{core}.multiarray", "_reconstruct"] = Global(lambda *_: Array())
            self.known[f"numpy.{core}.numeric", "_frombuffer"] = Global(self.from_buffer)

    def find_class(self, module: Any, name: Any, /) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'[:60]!r}, which is refused")
        return self.known[module, name]

    def refuse(self, *_: Any) -> None:
        raise pickle.UnpicklingError("it makes an array in a way that is refused")

    def encode(self, text: str, how: str = "latin1") -> bytes:
        """Bytes as Python 3 writes them for older readers; in all not more than the file itself."""
        self.budget -= len(text)
        if self.budget < 0 or how not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it holds text in a way that is refused")
        return codecs.latin_1_encode(text)[0]

    def from_buffer(self, content: Any, dtype: Any, shape: Any, order: Any) -> Array:
        array = Array()
        array.fill(shape, dtype, order == "F", content)
        return array

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, Array) and isinstance(state, tuple) and len(state) == 5:
            made.fill(*state[1:])
        elif not (
            isinstance(made, Type) and isinstance(state, tuple) and state[1:2] in (("|",), (b"|",), ("<",), (b"<",))
        ):
            raise pickle.UnpicklingError("it fills something that is not an array")

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.put([key, value])

    def load_setitems(self) -> None:
        self.put(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.put(items)

    def put(self, items: list[Any]) -> None:
        table = self.stack[-1]
        if not isinstance(table, dict) or not all(isinstance(key, str | bytes | int) for key in items[::2]):
            raise pickle.UnpicklingError("it has a table with names that are not plain")
        for key, value in zip(items[::2], items[1::2], strict=True):
            table[key] = value

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self.budget:
            raise pickle.UnpicklingError("it is cut short")
        self.stack.append(self.read(size))

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
