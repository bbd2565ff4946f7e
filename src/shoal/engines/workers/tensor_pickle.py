"""Pickles without the bytes of their tensors, which lie elsewhere: in shared memory, or in Ray's object store.

The form is that of pickle's protocol 5 with out-of-band buffers. Tensors that are read without a copy lie in memory
that other processes read, too, and must never be written to.
"""

import pickle
import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, like those that torch allocates: otherwise kernels may take another
path, and round differently."""
MIN_ALIGNED_BYTES = 2048
"""Below this size Ray's store does not align a buffer: such tensors are put into the pickle's own bytes."""

TensorBytes: TypeAlias = list[np.ndarray | bytes]
"""A block: the bytes of some tensors, which lie in the store as one object."""
FindStoredTensor: TypeAlias = Callable[[Tensor], tuple[Any, int] | None]
"""Where a tensor lies in the store already: the reference to a block, and its number in it; None if it does not."""


class StoredTensor(NamedTuple):
    """Stands in a pickle for the bytes of a tensor that lies in the store for several pickles."""

    block: int
    number: int


class TensorPickle(NamedTuple):
    """A pickled object and its tensors."""

    pickled: bytes
    tensors: TensorBytes
    shared_refs: list[Any]
    """References to the blocks of tensors that lie in the store for several pickles."""


class TensorPickler(pickle.Pickler):
    """Leaves the bytes of tensors to `locate_bytes`, which is asked once for each tensor, however often it occurs.

    It returns the buffer that they lie in or a StoredTensor. Buffers of other objects stay inside the pickle.
    """

    def __init__(self, out: BytesIO, locate_bytes: Callable[[Tensor], Any]):
        latest: list[pickle.PickleBuffer | None] = [None]
        # the callback must not refer to the pickler: a cycle would hold the tensors until the next garbage collection
        super().__init__(out, protocol=5, buffer_callback=lambda buffer: buffer is not latest[0])
        self.locate_bytes, self.latest = locate_bytes, latest

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        location = self.locate_bytes(obj)
        if not isinstance(location, StoredTensor):
            self.latest[0] = location = pickle.PickleBuffer(location)
        form = (location, obj.dtype, tuple(obj.shape))
        return rebuild_tensor, form if obj.is_cpu else (*form, True)


class StackPickler(TensorPickler):
    """Writes a stacked tensor once, and of its rows only their numbers; a stack has `most_rows` rows at most."""

    def __init__(self, out: BytesIO, locate_bytes: Callable[[Tensor], Any], most_rows: int):
        super().__init__(out, locate_bytes)
        self.most_rows = most_rows

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and is_row_of_stack(obj, self.most_rows):
            assert obj._base is not None
            return take_row, (obj._base, (obj.data_ptr() - obj._base.data_ptr()) // obj.nbytes)
        return super().reducer_override(obj)


class TensorUnpickler(pickle.Unpickler):
    """Reads what a TensorPickler wrote, with the buffers in the same order; `rebuild` makes a tensor of its bytes."""

    def __init__(self, pickled: bytes, buffers: Iterable[Any], rebuild: Callable[..., Tensor]):
        super().__init__(BytesIO(pickled), buffers=buffers)
        self.rebuild = rebuild

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name == rebuild_tensor.__name__ and module_name == __name__:
            return self.rebuild
        return super().find_class(module_name, global_name)


def is_row_of_stack(tensor: Tensor, most_rows: int) -> bool:
    """Whether a tensor is a row of a contiguous one that has from 2 to `most_rows` rows."""
    stack = tensor._base
    return (
        stack is not None
        and stack.dim() == tensor.dim() + 1
        and 1 < stack.shape[0] <= most_rows
        and stack.shape[1:] == tensor.shape
        and stack.dtype == tensor.dtype
        and tensor.nbytes > 0
        and not (tensor.is_conj() or tensor.is_neg())  # which only the view says, and not the numbers of the row
        and tensor.is_contiguous()
        and stack.is_contiguous()
        and (tensor.data_ptr() - stack.data_ptr()) % tensor.nbytes == 0
    )


def take_row(stack: Tensor, number: int) -> Tensor:
    """One row of a stacked tensor, on the memory of the stack."""
    return stack[number]


def rebuild_tensor(
    buffer: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    on_gpu: bool = False,
    gpu: torch.device | None = None,
    copy: bool = False,
) -> Tensor:
    """A tensor from its bytes: on `gpu` if it was `on_gpu`, else on them or, with `copy`, on a copy of them."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=gpu if on_gpu else None)
    tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    if on_gpu and gpu:
        return tensor.to(gpu)
    return tensor.clone() if copy or tensor.data_ptr() % ALIGNMENT else tensor


def pickle_with_tensors(
    content: Any,
    find_stored: FindStoredTensor = lambda tensor: None,
    pickler: Callable[..., TensorPickler] = TensorPickler,
) -> TensorPickle:
    """Pickle an object for the store; of tensors that lie there already (`find_stored`) only the place is kept."""
    out, tensors, shared_refs = BytesIO(), [], {}

    def locate_bytes(tensor: Tensor) -> Any:
        if stored := find_stored(tensor):
            ref, number = stored
            return StoredTensor(shared_refs.setdefault(ref, len(shared_refs)), number)
        tensors.append(view_tensor_bytes(tensor))
        return tensors[-1]

    pickler(out, locate_bytes).dump(content)
    return TensorPickle(out.getvalue(), tensors, list(shared_refs))


def unpickle_with_tensors(
    packed: TensorPickle,
    blocks: Sequence[TensorBytes],
    gpu: torch.device | None = None,
    copy: bool = False,
    known: MutableMapping[tuple[Any, int], Tensor] | None = None,
) -> Any:
    """The object, with the tensors of the blocks that it refers to; `gpu` is where tensors of a GPU go.

    `known` has tensors of shared blocks that were read before, by reference and number, and is added to.
    """
    rebuild, shared = partial(rebuild_tensor, gpu=gpu, copy=copy), {} if known is None else known

    def rebuild_or_share(location: Any, *form: Any) -> Tensor:
        if not isinstance(location, StoredTensor):
            return rebuild(location, *form)
        key = (packed.shared_refs[location.block], location.number)
        tensor = shared.get(key)
        if tensor is None:
            shared[key] = tensor = rebuild(blocks[location.block][location.number], *form)
        return tensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that arrays of the store are read-only
        return TensorUnpickler(packed.pickled, packed.tensors, rebuild_or_share).load()


def view_tensor_bytes(tensor: Tensor) -> np.ndarray | bytes:
    """The bytes of a tensor; of a large one without a copy, where it is contiguous and on the CPU."""
    array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array if len(array) >= MIN_ALIGNED_BYTES else array.tobytes()
