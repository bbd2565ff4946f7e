"""Top-k sparsification of the update with error feedback (Stich et al. 2018, arXiv:1809.07599)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Tree
from shoal.core.part import Neutral, Part
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import POSITION_CODES, pack_positions
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
class TopK(Part):
    """Sends the largest elements of each tensor; the rest is added to the next update.

    `ratio` is the share of elements sent. Without `feedback` the rest is lost. `positions` is how places are written:
    `64` or `32` bits each, `golomb`, `bitmap`, or `auto`, the smallest of these.
    """

    cite: ClassVar = ("stich2018sparsified",)
    stage: ClassVar = "sparsify"
    neutral: ClassVar = Neutral({"ratio": 1.0})

    ratio: float = 0.01
    feedback: bool = True
    positions: str = "auto"

    def __post_init__(self):
        require(
            self,
            f"0 < ratio <= 1 and positions in {POSITION_CODES}",
            0 < self.ratio <= 1 and self.positions in POSITION_CODES,
        )

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values, owed, body, rest = select_coded_values(message, link), memory.get("owed", {}), dict(message.body), {}
        due = lower_codec_memory(owed, values, link) if self.feedback and owed else {}
        for name, value in values.items():
            total = add_owed(value, due.get(name), name)
            at = find_largest(total, count_sent_elements(total.numel(), self.ratio))
            body[name] = body[name] | {"value": total[at], "at": pack_positions(at, total.numel(), self.positions)}
            if self.feedback:
                rest[name] = total.index_fill_(0, at, 0).view(value.shape)
        return replace(message, body=body), {"owed": lift_codec_memory(rest, owed, link)} if self.feedback else memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k for k, e in message.body.items() if "at" in e}
        return {
            k: torch.Size([count_sent_elements(s.numel(), self.ratio)]) if k in cut else s for k, s in shapes.items()
        }

    def decode(self, message: Message, link: CodecLink) -> Message:
        return decode_sparse_message(message, link, lambda n: count_sent_elements(n, self.ratio), self.positions)

    def error(self, value: Tensor) -> Tensor:
        return value.abs()
