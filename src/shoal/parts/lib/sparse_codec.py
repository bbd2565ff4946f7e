"""What sparsifying codecs share: which elements are sent, and the rest that is added to the next update."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

import numpy as np
import torch
from torch import Tensor

from shoal.core.model.tree import Params
from shoal.core.wire import CodecLink, Entry, Message
from shoal.parts.lib.position_codec import refuse_message, unpack_positions

THRESHOLD_SAMPLE = 1 << 15


def count_sent_elements(n: int, ratio: float) -> int:
    """How many of n elements travel: rounded up, and at least one."""
    return min(n, max(1, ceil(round(ratio * n, 9))))


def find_largest(values: Tensor, k: int) -> Tensor:
    """The rising positions of the k elements of the largest absolute value; of equal ones the first."""
    n = values.numel()
    if k >= n:
        return torch.arange(n, device=values.device)
    if values.is_cuda:
        sizes = values.abs()
        limit = sizes.topk(k, sorted=False).values.min()
        above, ties = (sizes > limit).nonzero().flatten(), (sizes == limit).nonzero().flatten()
        return torch.cat((above, ties[: k - above.numel()])).sort().values
    flat = values.numpy()
    near = preselect_largest(flat, k)
    sizes = np.abs(flat if near is None else flat[near])
    limit = find_kth_largest(sizes, k)
    above = sizes > limit
    above[np.flatnonzero(sizes == limit)[: k - np.count_nonzero(above)]] = True
    return torch.from_numpy(np.flatnonzero(above) if near is None else near[above])


def preselect_largest(flat: np.ndarray, k: int) -> np.ndarray | None:
    """Positions of somewhat more than the k largest, from a sampled threshold; None where that would not save time."""
    n = len(flat)
    sample = np.abs(flat[:: max(1, n // THRESHOLD_SAMPLE)])
    expected = k / n * len(sample)
    rank = int(expected + 4 * expected**0.5 + 8)
    if n < 4 * THRESHOLD_SAMPLE or rank > len(sample) // 2:
        return None
    limit = find_kth_largest(sample, rank)
    positions = np.flatnonzero((flat >= limit) | (flat <= -limit))
    return positions if k <= len(positions) < n else None


def find_kth_largest(sizes: np.ndarray, k: int) -> np.floating:
    """The k-th largest size."""
    return np.partition(sizes, len(sizes) - k)[len(sizes) - k]


def select_coded_values(message: Message, link: CodecLink) -> Params:
    """The values that are coded: those of trained tensors. Counters and running statistics travel as they are."""
    values = {k: e["value"] for k, e in message.body.items() if link.trained is None or k in link.trained}
    return {k: v for k, v in values.items() if v.is_floating_point()}


def lower_codec_memory(full: Mapping[str, Tensor], values: Params, link: CodecLink) -> Params:
    """The codec's memory, which has full shapes, cut to the values of this message; 0 where nothing is kept yet."""
    known = {k: full[k] if k in full else torch.zeros_like(link.like[k]) for k in values}
    return link.reduce_from_full(known)


def add_owed(value: Tensor, due: Tensor | None, name: str, factor: float = 1.0) -> Tensor:
    """value + factor * due as a new flat tensor, `due` being what was not sent before; refused if it is not finite."""
    flat = value.flatten()
    return check_finite_values(flat.clone() if due is None else torch.add(flat, due.flatten(), alpha=factor), name)


def lift_codec_memory(seen: Params, full: Mapping[str, Tensor], link: CodecLink) -> Params:
    """The codec's memory at full shapes after this message; what the message did not touch stays as it was."""
    if not link.plan and not link.earlier:
        return {**full, **seen}
    new, there = link.expand_to_full(seen), link.expand_to_full({k: torch.ones_like(v) for k, v in seen.items()})
    old = {k: full[k] if k in full else torch.zeros_like(v) for k, v in new.items()}
    return {**full, **{k: torch.where(there[k] > 0, v, old[k]) for k, v in new.items()}}


def decode_sparse_message(message: Message, link: CodecLink, count: Callable[[int], int], way: str) -> Message:
    """The message with dense values again, from entries that hold `count(n)` of n values and their positions."""
    body = {}
    for name, entry in message.body.items():
        shape, dtype = link.shapes[name], link.like[name].dtype
        if "at" not in entry:
            body[name] = entry | {"value": check_tensor_fits(entry["value"], shape, dtype, name)}
            continue
        k = count(shape.numel())
        values = check_tensor_fits(entry["value"], torch.Size([k]), dtype, name)
        body[name] = drop_entry_fields(entry, "at") | {
            "value": place_values(values, unpack_positions(entry["at"], shape.numel(), k, way), shape)
        }
    return replace(message, body=body)


def place_values(values: Tensor, at: Tensor, shape: torch.Size) -> Tensor:
    """A tensor with these values at these positions, and 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_copy_(0, at, values).view(shape)


def check_tensor_fits(tensor: Tensor, shape: torch.Size, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor of a message, refused where shape or type is not what belongs there."""
    if tensor.dtype != dtype or tensor.shape != shape:
        found, wanted = (f"{d} of shape {tuple(s)}" for d, s in ((tensor.dtype, tensor.shape), (dtype, shape)))
        refuse_message(f"has {found} for {name} where {wanted} belongs")
    return check_finite_values(tensor, name) if tensor.is_floating_point() else tensor


def check_finite_values(tensor: Tensor, name: str) -> Tensor:
    """The same tensor, refused where a value is not finite."""
    if tensor.numel() and not all(bool(end.isfinite()) for end in tensor.aminmax()):
        refuse_message(f"has values of {name} that are not finite")
    return tensor


def drop_entry_fields(entry: Entry, *names: str) -> Entry:
    """An entry without the fields that a codec wrote beside the value."""
    return {k: v for k, v in entry.items() if k not in names}
