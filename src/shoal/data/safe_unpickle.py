"""A reader of pickles that runs no code: plain containers and numpy arrays only, and nothing is ever imported."""

import codecs
import io
import math
import pickle
import struct
from typing import Any

import numpy as np

from shoal.data.download import LIMIT


class ArrayStandIn:
    """Stands for a numpy array while a pickle is read: shape, type and bytes, checked against each other."""

    def __init__(self):
        self.shape: tuple[int, ...] = (0,)
        self.dtype = "u1"
        self.fortran = False
        self.content = b""

    def fill(self, shape: Any, dtype: Any, fortran: Any, content: Any) -> None:
        if not isinstance(dtype, DtypeStandIn) or not isinstance(content, bytes) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array in it is not made of plain numbers")
        if not len(shape) <= 4 or not all(type(n) is int and 0 <= n <= LIMIT for n in shape):
            raise pickle.UnpicklingError("an array in it has an impossible shape")
        if math.prod(shape) * int(dtype.code[1:]) != len(content):
            raise pickle.UnpicklingError("the shape of an array in it does not fit its bytes")
        self.shape, self.dtype, self.content = shape, dtype.code, content
        self.fortran = bool(fortran)

    def to_numpy(self) -> np.ndarray:
        kind = np.dtype("<" + self.dtype)
        return np.frombuffer(bytearray(self.content), kind).reshape(self.shape, order="F" if self.fortran else "C")


class DtypeStandIn:
    """Stands for a numpy type: bytes or little-endian whole numbers."""

    def __init__(self, code: Any):
        code = code.decode("latin-1") if isinstance(code, bytes) else code
        if code not in ("u1", "i1", "i2", "i4", "i8"):
            raise pickle.UnpicklingError("an array in it is not made of bytes or whole numbers")
        self.code: str = code


class AllowedGlobal:
    """A name that a pickle may call: it stands for numpy's function and makes only the classes above."""

    __slots__ = ("make",)

    def __init__(self, make: Any):
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


ALLOWED_OPCODES = (
    "PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT "
    "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE"
)


_PythonUnpickler: Any = pickle._Unpickler
"""The one in Python: the one in C makes room for any number that a pickle names."""


class SafeUnpickler(_PythonUnpickler):
    """Reads plain containers and numpy arrays, and nothing else.

    No name in a pickle is ever looked up: the few that arrays need are answered by the stand-ins above, and everything
    that could make an object, take memory by announcing it, or hash a nested key is not among the known commands.
    """

    dispatch: dict[int, Any] = {
        code: _PythonUnpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in ALLOWED_OPCODES.split())
    }

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.budget = len(content)
        known = {"ndarray": self.refuse_call, "dtype": lambda code, *_: DtypeStandIn(code)}
        self.known = {("numpy", name): AllowedGlobal(make) for name, make in known.items()}
        self.known["_codecs", "encode"] = AllowedGlobal(self.encode_latin1)
        for core in ("core", "_core"):
            self.known[f"numpy.{core}.multiarray", "_reconstruct"] = AllowedGlobal(lambda *_: ArrayStandIn())
            self.known[f"numpy.{core}.numeric", "_frombuffer"] = AllowedGlobal(self.from_buffer)

    def find_class(self, module: Any, name: Any, /) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'[:60]!r}, which is refused")
        return self.known[module, name]

    def refuse_call(self, *_: Any) -> None:
        raise pickle.UnpicklingError("it makes an array in a way that is refused")

    def encode_latin1(self, text: str, how: str = "latin1") -> bytes:
        """Bytes as Python 3 writes them for older readers; in all not more than the file itself."""
        self.budget -= len(text)
        if self.budget < 0 or how not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it holds text in a way that is refused")
        return codecs.latin_1_encode(text)[0]

    def from_buffer(self, content: Any, dtype: Any, shape: Any, order: Any) -> ArrayStandIn:
        array = ArrayStandIn()
        array.fill(shape, dtype, order == "F", content)
        return array

    def load_build(self) -> None:
        state = self.stack.pop()
        stand_in = self.stack[-1]
        if isinstance(stand_in, ArrayStandIn) and isinstance(state, tuple) and len(state) == 5:
            stand_in.fill(*state[1:])
        elif not (
            isinstance(stand_in, DtypeStandIn)
            and isinstance(state, tuple)
            and state[1:2] in (("|",), (b"|",), ("<",), (b"<",))
        ):
            raise pickle.UnpicklingError("it fills something that is not an array")

    def load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self.put_items([key, value])

    def load_setitems(self) -> None:
        self.put_items(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.put_items(items)

    def put_items(self, items: list[Any]) -> None:
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
