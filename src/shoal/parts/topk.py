"""Top-k sparsification of the update with error feedback (Stich et al. 2018, arXiv:1809.07599)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Tree
from shoal.core.part import Neutral, Part
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import WAYS, pack
from shoal.parts.lib.sparse_codec import coded, largest, lifted, lowered, scattered, share, summed


@dataclass(frozen=True)
class TopK(Part):
    """Of each tensor the largest elements travel; the rest is owed to the next round."""

    stage: ClassVar = "sparsify"
    neutral: ClassVar = Neutral({"ratio": 1.0})

    ratio: float = 0.01
    feedback: bool = True
    positions: str = "auto"

    def __post_init__(self):
        require(self, f"0 < ratio <= 1 and positions in {WAYS}", 0 < self.ratio <= 1 and self.positions in WAYS)

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values, owed, body, rest = coded(message, link), memory.get("owed", {}), dict(message.body), {}
        due = lowered(owed, values, link) if self.feedback and owed else {}
        for name, value in values.items():
            total = summed(value, due.get(name), name)
            at = largest(total, share(total.numel(), self.ratio))
            body[name] = body[name] | {"value": total[at], "at": pack(at, total.numel(), self.positions)}
            if self.feedback:
                rest[name] = total.index_fill_(0, at, 0).view(value.shape)
        return replace(message, body=body), {"owed": lifted(rest, owed, link)} if self.feedback else memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k for k, e in message.body.items() if "at" in e}
        return {k: torch.Size([share(s.numel(), self.ratio)]) if k in cut else s for k, s in shapes.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        return scattered(message, link, lambda n: share(n, self.ratio), self.positions)

    def error(self, value: Tensor) -> Tensor:
        return value.abs()
