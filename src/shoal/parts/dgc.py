"""Deep Gradient Compression: the top of a momentum-corrected sum of updates (Lin et al. 2018, arXiv:1712.01887)."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import POSITION_CODES, count_positions, pack_positions
from shoal.parts.lib.sparse_codec import (
    add_owed,
    count_sent_elements,
    decode_sparse_message,
    find_largest,
    lift_codec_memory,
    lower_codec_memory,
    select_coded_values,
)


@dataclass(frozen=True)
class DGC(Part):
    """Sends the largest elements of a momentum-corrected sum of all updates not sent yet.

    u = momentum u + delta and v = v + u; the largest elements of v travel, and u and v are 0 there afterwards.

    `ratio` is the share of elements sent. `clip` bounds the norm of an update (0: not). `warmup` lists the rounds at
    which the stages of a warm-up end: the first sends a quarter of the elements, each next one a quarter of that.
    `positions` is how places are written: `64` or `32` bits each, `golomb`, `bitmap`, or `auto`, the smallest of these.
    """

    cite: ClassVar = ("lin2018dgc",)
    stage: ClassVar = "sparsify"
    neutral: ClassVar = Neutral({"ratio": 1.0, "momentum": 0.0, "clip": 0.0, "warmup": ""})

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    warmup: str = "21,30,40,50"
    positions: str = "64"

    def __post_init__(self):
        rule = "0 < ratio <= 1, 0 <= momentum < 1, clip >= 0, warmup as rising numbers of rounds, "
        rule += f"positions in {POSITION_CODES}"
        numbers = 0 < self.ratio <= 1 and 0 <= self.momentum < 1 and self.clip >= 0
        words = self.warmup.split(",") if self.warmup else []
        rising = all(w.strip().isdecimal() for w in words) and all(a < b for a, b in pairwise([0, *map(int, words)]))
        require(self, rule, numbers and rising and self.positions in POSITION_CODES)

    def compute_ratio(self, round: int) -> float:
        """A quarter of the elements at first, in every stage of the warm-up a quarter of that, in the end `ratio`."""
        ends = [int(word) for word in self.warmup.split(",")] if self.warmup else []
        return max([self.ratio, *(0.25 ** (stage + 1) for stage, end in enumerate(ends) if round < end)])

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values, body = clip_update_norm(select_coded_values(message, link), self.clip), dict(message.body)
        u, v = memory.get("u", {}), memory.get("v", {})
        push, sums = (lower_codec_memory(full, values, link) if full else {} for full in (u, v))
        for name, value in values.items():
            flat, n = value, value.numel()
            if self.momentum:
                flat = push[name] = add_owed(value, push.get(name), name, self.momentum)
            total = add_owed(flat, sums.get(name), name)
            at = find_largest(total, count_sent_elements(n, self.compute_ratio(link.round)))
            body[name] = body[name] | {"value": total[at], "at": pack_positions(at, n, self.positions)}
            sums[name] = total.index_fill_(0, at, 0).view(value.shape)
            if self.momentum:
                push[name] = push[name].index_fill_(0, at, 0).view(value.shape)
        kept = {"u": lift_codec_memory(push, u, link)} if self.momentum else {}
        return replace(message, body=body), kept | {"v": lift_codec_memory(sums, v, link)}

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        at = {k: e["at"] for k, e in message.body.items() if "at" in e}
        return shapes | {k: torch.Size([count_positions(a, shapes[k].numel(), self.positions)]) for k, a in at.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        return decode_sparse_message(
            message, link, lambda n: count_sent_elements(n, self.compute_ratio(link.round)), self.positions
        )

    def error(self, value: Tensor) -> Tensor:
        return value.abs()


def clip_update_norm(values: Params, limit: float) -> Params:
    """An update scaled down where its norm is above the limit; 0 is none."""
    if not limit or not values:
        return values
    norm = torch.stack([torch.linalg.vector_norm(v, dtype=torch.float64) for v in values.values()]).norm()
    # 1e-300: an update of zeros has no norm to divide by
    return tree.scale_params(values, min(1.0, limit / max(float(norm), 1e-300)))
