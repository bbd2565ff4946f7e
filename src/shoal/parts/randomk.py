"""Random-k: both ends draw the same positions, so only values travel (Konecny et al. 2016, arXiv:1610.05492)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Tree
from shoal.core.part import Neutral, Part
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.sparse_codec import (
    add_owed,
    check_finite_values,
    check_tensor_fits,
    count_sent_elements,
    drop_entry_fields,
    find_largest,
    lift_codec_memory,
    lower_codec_memory,
    place_values,
    select_coded_values,
)

DRAWN_MARK = torch.empty(0, dtype=torch.uint8)
"""Stands in an entry whose values are at drawn positions, and costs nothing."""


@dataclass(frozen=True)
class RandomK(Part):
    """Sends some elements of each tensor, drawn anew in each round; both ends draw the same places.

    `ratio` is the share of elements sent. With `feedback` the rest is added to the next update; without it what is sent
    is scaled up to make up for it.
    """

    cite: ClassVar = ("konecny2016strategies",)
    stage: ClassVar = "sparsify"
    neutral: ClassVar = Neutral({"ratio": 1.0})

    ratio: float = 0.01
    feedback: bool = True

    def __post_init__(self):
        require(self, "0 < ratio <= 1", 0 < self.ratio <= 1)

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values, owed, body, rest = select_coded_values(message, link), memory.get("owed", {}), dict(message.body), {}
        due = lower_codec_memory(owed, values, link) if self.feedback and owed else {}
        generator = link.generator()
        for name, value in values.items():
            total = add_owed(value, due.get(name), name)
            at = draw_positions(total.numel(), self.ratio, generator).to(total.device)
            sent = total[at]
            if self.feedback:
                rest[name] = total.index_fill_(0, at, 0).view(value.shape)
            elif len(at):
                sent = check_finite_values(sent * (total.numel() / len(at)), name)
            body[name] = body[name] | {"value": sent, "drawn": DRAWN_MARK.to(total.device)}
        return replace(message, body=body), {"owed": lift_codec_memory(rest, owed, link)} if self.feedback else memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k for k, e in message.body.items() if "drawn" in e}
        return {
            k: torch.Size([count_sent_elements(s.numel(), self.ratio)]) if k in cut else s for k, s in shapes.items()
        }

    def decode(self, message: Message, link: CodecLink) -> Message:
        body, generator = {}, link.generator()
        for name, entry in message.body.items():
            shape, dtype = link.shapes[name], link.like[name].dtype
            if "drawn" not in entry:
                body[name] = entry | {"value": check_tensor_fits(entry["value"], shape, dtype, name)}
                continue
            values = check_tensor_fits(
                entry["value"], torch.Size([count_sent_elements(shape.numel(), self.ratio)]), dtype, name
            )
            at = draw_positions(shape.numel(), self.ratio, generator).to(values.device)
            body[name] = drop_entry_fields(entry, "drawn") | {"value": place_values(values, at, shape)}
        return replace(message, body=body)

    def error(self, value: Tensor) -> Tensor:
        return value.abs() * (1.0 if self.feedback else max(1.0, 1 / self.ratio - 1))


def draw_positions(n: int, ratio: float, generator: torch.Generator) -> Tensor:
    """The positions that travel, rising: those of the largest of n random numbers."""
    k = count_sent_elements(n, ratio)
    return find_largest(torch.rand(n, generator=generator), k) if k < n else torch.arange(n)
