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
from shoal.parts.lib.position_codec import WAYS, counted, pack
from shoal.parts.lib.sparse_codec import coded, largest, lifted, lowered, scattered, share, summed


@dataclass(frozen=True)
class DGC(Part):
    """u = momentum u + delta; v = v + u; the largest elements of v travel, and u and v are 0 there."""

    stage: ClassVar = "sparsify"
    neutral: ClassVar = Neutral({"ratio": 1.0, "momentum": 0.0, "clip": 0.0, "warmup": ""})

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    warmup: str = "21,30,40,50"
    positions: str = "64"

    def __post_init__(self):
        rule = f"0 < ratio <= 1, 0 <= momentum < 1, clip >= 0, warmup as rising numbers of rounds, positions in {WAYS}"
        numbers = 0 < self.ratio <= 1 and 0 <= self.momentum < 1 and self.clip >= 0
        words = self.warmup.split(",") if self.warmup else []
        rising = all(w.strip().isdecimal() for w in words) and all(a < b for a, b in pairwise([0, *map(int, words)]))
        require(self, rule, numbers and rising and self.positions in WAYS)

    def ratio_in(self, round: int) -> float:
        """A quarter of the elements at first, in every stage of the warm-up a quarter of that, in the end `ratio`."""
        ends = [int(word) for word in self.warmup.split(",")] if self.warmup else []
        return max([self.ratio, *(0.25 ** (stage + 1) for stage, end in enumerate(ends) if round < end)])

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values, body = clipped(coded(message, link), self.clip), dict(message.body)
        u, v = memory.get("u", {}), memory.get("v", {})
        push, sums = (lowered(full, values, link) if full else {} for full in (u, v))
        for name, value in values.items():
            flat, n = value, value.numel()
            if self.momentum:
                flat = push[name] = summed(value, push.get(name), name, self.momentum)
            total = summed(flat, sums.get(name), name)
            at = largest(total, share(n, self.ratio_in(link.round)))
            body[name] = body[name] | {"value": total[at], "at": pack(at, n, self.positions)}
            sums[name] = total.index_fill_(0, at, 0).view(value.shape)
            if self.momentum:
                push[name] = push[name].index_fill_(0, at, 0).view(value.shape)
        kept = {"u": lifted(push, u, link)} if self.momentum else {}
        return replace(message, body=body), kept | {"v": lifted(sums, v, link)}

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        at = {k: e["at"] for k, e in message.body.items() if "at" in e}
        return shapes | {k: torch.Size([counted(a, shapes[k].numel(), self.positions)]) for k, a in at.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        return scattered(message, link, lambda n: share(n, self.ratio_in(link.round)), self.positions)

    def error(self, value: Tensor) -> Tensor:
        return value.abs()


def clipped(values: Params, limit: float) -> Params:
    """An update scaled down where its norm is above the limit; 0 is none."""
    if not limit or not values:
        return values
    norm = torch.stack([torch.linalg.vector_norm(v, dtype=torch.float64) for v in values.values()]).norm()
    return tree.scale_params(values, min(1.0, limit / max(float(norm), 1e-300)))
