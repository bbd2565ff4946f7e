"""A codec for the positions of single elements in a message.

Positions are rising numbers below n. They are written as 64-bit or 32-bit numbers, as a bitmap, or as the gaps between
them in Golomb-Rice code; `auto` takes the smallest and says in one byte which. What does not fit is refused.
"""

from math import log, log2
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.wire import pack_bits, unpack_bits

POSITION_CODES = ("auto", "64", "32", "golomb", "bitmap")
AUTO_CODES = ("all", "32", "golomb", "bitmap", "64")
"""What the first byte of `auto` says."""
LIST_DTYPES = {"64": torch.int64, "32": torch.int32}
GOLOMB_HEADER = 5
"""Bytes before the bits of a Golomb-Rice code: its parameter, and 4 for the count."""


def pack_positions(at: Tensor, n: int, way: str) -> Tensor:
    """Rising positions below n, written in one of POSITION_CODES."""
    if way == "auto":
        way = pick_smallest_code(at, n)
        inside = pack_positions(at, n, way).contiguous().view(torch.uint8)
        return torch.cat((inside.new_tensor([AUTO_CODES.index(way)]), inside))
    if way == "all":
        return torch.empty(0, dtype=torch.uint8, device=at.device)
    if way == "bitmap":
        return pack_bits(torch.zeros(n, dtype=torch.bool, device=at.device).index_fill_(0, at, True))
    if way == "golomb":
        return torch.from_numpy(encode_golomb(at.cpu().numpy())).to(at.device)
    if way == "32" and n >= 2**31:
        raise ShoalError("bad-value", f"{n} elements have no 32-bit positions.", 'Use positions="64" or "auto".')
    return at.to(LIST_DTYPES[way])


def unpack_positions(packed: Tensor, n: int, k: int, way: str) -> Tensor:
    """The k positions that `pack_positions` wrote; refused where they are not k rising numbers below n."""
    way, packed = open_positions(packed, n, way)
    if way == "all":
        at = torch.arange(n, device=packed.device)
    elif way == "bitmap":
        at = unpack_bitmap(packed, n).nonzero().flatten()
    elif way == "golomb":
        at = torch.from_numpy(decode_golomb(packed.cpu().numpy(), n)).to(packed.device)
    else:
        at = packed.long()
    if at.numel() != k:
        refuse_message(f"has {at.numel()} positions where {k} belong")
    if k and not (int(at[0]) >= 0 and int(at[-1]) < n and bool((at[1:] > at[:-1]).all())):
        refuse_message(f"has positions that are not rising numbers below {n}")
    return at


def count_positions(packed: Tensor, n: int, way: str) -> int:
    """How many positions `pack_positions` wrote, without reading them all."""
    way, packed = open_positions(packed, n, way)
    if way == "all":
        return n
    if way == "bitmap":
        return int(unpack_bitmap(packed, n).sum())
    return read_golomb_count(packed.cpu().numpy(), n) if way == "golomb" else packed.numel()


def pick_smallest_code(at: Tensor, n: int) -> str:
    """The code that takes the fewest bytes."""
    k = at.numel()
    if k == n:
        return "all"
    size = {"32": 4 * k if n < 2**31 else 8 * n, "bitmap": (n + 7) // 8, "64": 8 * k}
    if GOLOMB_HEADER + k // 8 < min(size.values()):
        size["golomb"] = GOLOMB_HEADER + (pick_golomb_parameter(compute_gaps(at.cpu().numpy()))[1] + 7) // 8
    return min(size, key=lambda way: size[way])


def open_positions(packed: Tensor, n: int, way: str) -> tuple[str, Tensor]:
    """The code that `auto` took, and what was written in it."""
    dtype = LIST_DTYPES.get(way, torch.uint8)
    if packed.dtype != dtype or packed.dim() != 1:
        refuse_message(f"has positions of the type {packed.dtype}, {packed.dim()}-dimensional, where {dtype} belongs")
    if way != "auto":
        return way, packed
    if not packed.numel() or int(packed[0]) >= len(AUTO_CODES):
        refuse_message("does not say how its positions are written")
    way, packed = AUTO_CODES[int(packed[0])], packed[1:]
    if way in LIST_DTYPES:
        if packed.numel() % LIST_DTYPES[way].itemsize:
            refuse_message("has positions that are cut short")
        return way, packed.clone().view(LIST_DTYPES[way])
    if way == "all" and packed.numel():
        refuse_message(f"has {packed.numel()} bytes of positions too many")
    return way, packed


def unpack_bitmap(packed: Tensor, n: int) -> Tensor:
    """The n bits of a bitmap; refused where there are more or fewer, or some behind the last."""
    if packed.dtype != torch.uint8 or packed.shape != ((n + 7) // 8,):
        refuse_message(f"has {packed.nbytes} bytes of {packed.dtype} for {n} bits")
    if n % 8 and int(packed[-1]) & (0xFF >> n % 8):
        refuse_message(f"has bits behind the last of {n}")
    return unpack_bits(packed, torch.Size([n]))


# Golomb-Rice ------------------------------------------------------------------------------------------------------
def encode_golomb(at: np.ndarray) -> np.ndarray:
    """The parameter b, the count, the gaps' quotients by 2^b in unary, then their remainders in b bits each."""
    gaps = compute_gaps(at)
    b, size = pick_golomb_parameter(gaps)
    bits = np.zeros(size, np.uint8)
    bits[np.cumsum((gaps >> b) + 1) - 1] = 1
    start = size - len(gaps) * b
    for bit in range(b):
        bits[start + bit :: b] = gaps >> (b - 1 - bit) & 1
    head = np.array([b, *np.array([len(at)], "<u4").view(np.uint8)], np.uint8)
    return np.concatenate((head, np.packbits(bits)))


def decode_golomb(packed: np.ndarray, n: int) -> np.ndarray:
    """The positions that `encode_golomb` wrote."""
    k, b = read_golomb_count(packed, n), int(packed[0])
    bits = np.unpackbits(packed[GOLOMB_HEADER:])
    ends = np.flatnonzero(bits)[:k]
    start = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) < k or len(bits) != (start + k * b + 7) // 8 * 8 or bits[start + k * b :].any():
        refuse_message(f"has a code of positions that does not hold {k} of them")
    quotients = np.diff(ends, prepend=-1) - 1
    if int(quotients.sum()) << b > n:
        refuse_message(f"has positions that are not below {n}")
    gaps = (quotients << b) + 1
    for bit in range(b):
        gaps += bits[start + bit : start + k * b : b].astype(np.int64) << (b - 1 - bit)
    return np.cumsum(gaps) - 1


def read_golomb_count(packed: np.ndarray, n: int) -> int:
    """The number of positions in the header of a Golomb-Rice code."""
    k = int(packed[1:GOLOMB_HEADER].copy().view("<u4")[0]) if len(packed) >= GOLOMB_HEADER else -1
    if not 0 <= k <= n or packed[0] > n.bit_length():
        refuse_message(f"has a code of positions that cannot be about {n} elements")
    return k


def compute_gaps(at: np.ndarray) -> np.ndarray:
    """How many elements lie before each position and behind the one before."""
    return np.diff(at, prepend=-1) - 1


def pick_golomb_parameter(gaps: np.ndarray) -> tuple[int, int]:
    """The parameter b with which the gaps take the fewest bits, and how many bits that is."""
    mean = float(gaps.mean()) if len(gaps) else 0.0
    guess = max(0, round(log2(max(mean * log(2), 1.0))))
    costs = {b: int((gaps >> b).sum()) + len(gaps) * (b + 1) for b in range(max(0, guess - 1), guess + 2)}
    return min(costs.items(), key=lambda item: item[1])


def refuse_message(why: str) -> NoReturn:
    """Raises the error for a message that was damaged or does not fit."""
    raise ShoalError("damaged", f"A message {why}.", "It was damaged on its way, or made by another method.")
