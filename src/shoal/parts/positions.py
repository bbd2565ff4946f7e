"""Sparse messages: which elements travel, how their positions are written, and what is owed to the next round.

Positions are rising numbers below n. They are written as 64-bit or 32-bit numbers, as a bitmap, or as the gaps between
them in Golomb-Rice code; `auto` takes the smallest and says in one byte which. What does not fit is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil, log, log2
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.tree import Params
from shoal.core.wire import Entry, Link, Message, bits, unbits

WAYS = ("auto", "64", "32", "golomb", "bitmap")
AUTO = ("all", "32", "golomb", "bitmap", "64")
"""What the first byte of `auto` says."""
LISTS = {"64": torch.int64, "32": torch.int32}
HEAD = 5
"""Bytes before the bits of a Golomb-Rice code: its parameter, and 4 for the count."""
SAMPLE = 1 << 15


# positions on the wire --------------------------------------------------------------------------------------------
def pack(at: Tensor, n: int, way: str) -> Tensor:
    """Rising positions below n as they travel."""
    if way == "auto":
        way = smallest(at, n)
        inside = pack(at, n, way).contiguous().view(torch.uint8)
        return torch.cat((inside.new_tensor([AUTO.index(way)]), inside))
    if way == "all":
        return torch.empty(0, dtype=torch.uint8, device=at.device)
    if way == "bitmap":
        return bits(torch.zeros(n, dtype=torch.bool, device=at.device).index_fill_(0, at, True))
    if way == "golomb":
        return torch.from_numpy(golomb(at.cpu().numpy())).to(at.device)
    if way == "32" and n >= 2**31:
        raise ShoalError("bad-value", f"{n} elements have no 32-bit positions.", 'Use positions="64" or "auto".')
    return at.to(LISTS[way])


def unpack(packed: Tensor, n: int, k: int, way: str) -> Tensor:
    """The k positions that `pack` wrote; refused where they are not k rising numbers below n."""
    way, packed = opened(packed, n, way)
    if way == "all":
        at = torch.arange(n, device=packed.device)
    elif way == "bitmap":
        at = mask_of(packed, n).nonzero().flatten()
    elif way == "golomb":
        at = torch.from_numpy(ungolomb(packed.cpu().numpy(), n)).to(packed.device)
    else:
        at = packed.long()
    if at.numel() != k:
        refuse(f"has {at.numel()} positions where {k} belong")
    if k and not (int(at[0]) >= 0 and int(at[-1]) < n and bool((at[1:] > at[:-1]).all())):
        refuse(f"has positions that are not rising numbers below {n}")
    return at


def counted(packed: Tensor, n: int, way: str) -> int:
    """How many positions `pack` wrote, as far as that can be told at a glance."""
    way, packed = opened(packed, n, way)
    if way == "all":
        return n
    if way == "bitmap":
        return int(mask_of(packed, n).sum())
    return count_of(packed.cpu().numpy(), n) if way == "golomb" else packed.numel()


def smallest(at: Tensor, n: int) -> str:
    """The way that takes the fewest bytes."""
    k = at.numel()
    if k == n:
        return "all"
    size = {"32": 4 * k if n < 2**31 else 8 * n, "bitmap": (n + 7) // 8, "64": 8 * k}
    if HEAD + k // 8 < min(size.values()):
        size["golomb"] = HEAD + (parameter(gaps_of(at.cpu().numpy()))[1] + 7) // 8
    return min(size, key=lambda way: size[way])


def opened(packed: Tensor, n: int, way: str) -> tuple[str, Tensor]:
    """The way that was really taken, and what was written in it."""
    dtype = LISTS.get(way, torch.uint8)
    if packed.dtype != dtype or packed.dim() != 1:
        refuse(f"has positions of the type {packed.dtype}, {packed.dim()}-dimensional, where {dtype} belongs")
    if way != "auto":
        return way, packed
    if not packed.numel() or int(packed[0]) >= len(AUTO):
        refuse("does not say how its positions are written")
    way, packed = AUTO[int(packed[0])], packed[1:]
    if way in LISTS:
        if packed.numel() % LISTS[way].itemsize:
            refuse("has positions that are cut short")
        return way, packed.clone().view(LISTS[way])
    if way == "all" and packed.numel():
        refuse(f"has {packed.numel()} bytes of positions too many")
    return way, packed


def mask_of(packed: Tensor, n: int) -> Tensor:
    """The n bits of a bitmap; refused where there are more or fewer, or some behind the last."""
    if packed.dtype != torch.uint8 or packed.shape != ((n + 7) // 8,):
        refuse(f"has {packed.nbytes} bytes of {packed.dtype} for {n} bits")
    if n % 8 and int(packed[-1]) & (0xFF >> n % 8):
        refuse(f"has bits behind the last of {n}")
    return unbits(packed, torch.Size([n]))


# Golomb-Rice ------------------------------------------------------------------------------------------------------
def golomb(at: np.ndarray) -> np.ndarray:
    """The parameter b, the count, the gaps' quotients by 2^b in unary, then their remainders in b bits each."""
    gaps = gaps_of(at)
    b, size = parameter(gaps)
    told = np.zeros(size, np.uint8)
    told[np.cumsum((gaps >> b) + 1) - 1] = 1
    start = size - len(gaps) * b
    for bit in range(b):
        told[start + bit :: b] = gaps >> (b - 1 - bit) & 1
    head = np.array([b, *np.array([len(at)], "<u4").view(np.uint8)], np.uint8)
    return np.concatenate((head, np.packbits(told)))


def ungolomb(packed: np.ndarray, n: int) -> np.ndarray:
    """The positions that `golomb` wrote."""
    k, b = count_of(packed, n), int(packed[0])
    told = np.unpackbits(packed[HEAD:])
    ends = np.flatnonzero(told)[:k]
    start = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) < k or len(told) != (start + k * b + 7) // 8 * 8 or told[start + k * b :].any():
        refuse(f"has a code of positions that does not hold {k} of them")
    quotients = np.diff(ends, prepend=-1) - 1
    if int(quotients.sum()) << b > n:
        refuse(f"has positions that are not below {n}")
    gaps = (quotients << b) + 1
    for bit in range(b):
        gaps += told[start + bit : start + k * b : b].astype(np.int64) << (b - 1 - bit)
    return np.cumsum(gaps) - 1


def count_of(packed: np.ndarray, n: int) -> int:
    k = int(packed[1:HEAD].copy().view("<u4")[0]) if len(packed) >= HEAD else -1
    if not 0 <= k <= n or packed[0] > n.bit_length():
        refuse(f"has a code of positions that cannot be about {n} elements")
    return k


def gaps_of(at: np.ndarray) -> np.ndarray:
    """How many elements lie before each position and behind the one before."""
    return np.diff(at, prepend=-1) - 1


def parameter(gaps: np.ndarray) -> tuple[int, int]:
    """The number of bits that are written plainly with which the gaps take the fewest, and how many that is."""
    mean = float(gaps.mean()) if len(gaps) else 0.0
    guess = max(0, round(log2(max(mean * log(2), 1.0))))
    costs = {b: int((gaps >> b).sum()) + len(gaps) * (b + 1) for b in range(max(0, guess - 1), guess + 2)}
    return min(costs.items(), key=lambda item: item[1])


# which elements travel --------------------------------------------------------------------------------------------
def share(n: int, ratio: float) -> int:
    """How many of n elements travel: rounded up, and at least one."""
    return min(n, max(1, ceil(round(ratio * n, 9))))


def largest(values: Tensor, k: int) -> Tensor:
    """The positions of the k numbers of the largest size, rising; of equal ones the first."""
    n = values.numel()
    if k >= n:
        return torch.arange(n, device=values.device)
    if values.is_cuda:
        sizes = values.abs()
        limit = sizes.topk(k, sorted=False).values.min()
        above, ties = (sizes > limit).nonzero().flatten(), (sizes == limit).nonzero().flatten()
        return torch.cat((above, ties[: k - above.numel()])).sort().values
    flat = values.numpy()
    near = candidates(flat, k)
    sizes = np.abs(flat if near is None else flat[near])
    limit = lowest(sizes, k)
    above = sizes > limit
    above[np.flatnonzero(sizes == limit)[: k - np.count_nonzero(above)]] = True
    return torch.from_numpy(np.flatnonzero(above) if near is None else near[above])


def candidates(flat: np.ndarray, k: int) -> np.ndarray | None:
    """The positions of some more than the k largest, told from a sample; None where that would not help."""
    n = len(flat)
    sample = np.abs(flat[:: max(1, n // SAMPLE)])
    expected = k / n * len(sample)
    rank = int(expected + 4 * expected**0.5 + 8)
    if n < 4 * SAMPLE or rank > len(sample) // 2:
        return None
    limit = lowest(sample, rank)
    found = np.flatnonzero((flat >= limit) | (flat <= -limit))
    return found if k <= len(found) < n else None


def lowest(sizes: np.ndarray, k: int) -> np.floating:
    """The smallest of the k largest."""
    return np.partition(sizes, len(sizes) - k)[len(sizes) - k]


# what codecs of single elements have in common --------------------------------------------------------------------
def coded(message: Message, link: Link) -> Params:
    """The values that such a codec codes: what is trained. Counters and running statistics travel as they are."""
    values = {k: e["value"] for k, e in message.body.items() if link.trained is None or k in link.trained}
    return {k: v for k, v in values.items() if v.is_floating_point()}


def lowered(full: Mapping[str, Tensor], values: Params, link: Link) -> Params:
    """Of what is kept at full shape, what the codec sees; 0 where nothing is kept yet."""
    known = {k: full[k] if k in full else torch.zeros_like(link.like[k]) for k in values}
    return link.lower(known)


def summed(value: Tensor, due: Tensor | None, name: str, factor: float = 1.0) -> Tensor:
    """What is due by now as a new list of numbers, value + factor due; refused where one of them is none."""
    flat = value.flatten()
    return finite(flat.clone() if due is None else torch.add(flat, due.flatten(), alpha=factor), name)


def lifted(seen: Params, full: Mapping[str, Tensor], link: Link) -> Params:
    """What is kept at full shape after this round: what the codec did not see stays as it was."""
    if not link.plan and not link.earlier:
        return {**full, **seen}
    new, there = link.lift(seen), link.lift({k: torch.ones_like(v) for k, v in seen.items()})
    old = {k: full[k] if k in full else torch.zeros_like(v) for k, v in new.items()}
    return {**full, **{k: torch.where(there[k] > 0, v, old[k]) for k, v in new.items()}}


def scattered(message: Message, link: Link, count: Callable[[int], int], way: str) -> Message:
    """A message whose entries hold some values and their positions, `count(n)` of n, with all values again."""
    body = {}
    for name, entry in message.body.items():
        shape, dtype = link.shapes[name], link.like[name].dtype
        if "at" not in entry:
            body[name] = entry | {"value": fitting(entry["value"], shape, dtype, name)}
            continue
        k = count(shape.numel())
        values = fitting(entry["value"], torch.Size([k]), dtype, name)
        body[name] = without(entry, "at") | {"value": placed(values, unpack(entry["at"], shape.numel(), k, way), shape)}
    return replace(message, body=body)


def placed(values: Tensor, at: Tensor, shape: torch.Size) -> Tensor:
    """A tensor with these values at these positions, and 0 elsewhere."""
    return values.new_zeros(shape.numel()).index_copy_(0, at, values).view(shape)


def fitting(tensor: Tensor, shape: torch.Size, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor as it arrived, refused where it is not what belongs there."""
    if tensor.dtype != dtype or tensor.shape != shape:
        found, wanted = (f"{d} of shape {tuple(s)}" for d, s in ((tensor.dtype, tensor.shape), (dtype, shape)))
        refuse(f"has {found} for {name} where {wanted} belongs")
    return finite(tensor, name) if tensor.is_floating_point() else tensor


def finite(tensor: Tensor, name: str) -> Tensor:
    """The same tensor, refused where a number in it is none."""
    if tensor.numel() and not all(bool(end.isfinite()) for end in tensor.aminmax()):
        refuse(f"has values of {name} that are not finite")
    return tensor


def without(entry: Entry, *names: str) -> Entry:
    """An entry without what a codec wrote beside the value."""
    return {k: v for k, v in entry.items() if k not in names}


def refuse(why: str) -> NoReturn:
    raise ShoalError("damaged", f"A message {why}.", "It was damaged on its way, or made by another method.")
