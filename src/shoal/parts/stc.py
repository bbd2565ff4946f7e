"""Sparse Ternary Compression: the top elements by sign and one common size (Sattler et al. 2019, arXiv:1903.02891)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.part import Part
from shoal.core.tree import Tree
from shoal.core.wire import Link, Message, bits
from shoal.parts.checks import require
from shoal.parts.elements import coded, fitting, largest, lifted, lowered, placed, share, summed, without
from shoal.parts.positions import WAYS, mask_of, pack, refuse, unpack


@dataclass(frozen=True)
class STC(Part):
    """Of each tensor the largest elements travel as a sign each and their mean size; the rest is owed."""

    stage: ClassVar = "sparsify"

    ratio: float = 0.0025
    positions: str = "64"

    def __post_init__(self):
        require(self, f"0 < ratio <= 1 and positions in {WAYS}", 0 < self.ratio <= 1 and self.positions in WAYS)

    def encode(self, message: Message, memory: Tree, link: Link) -> tuple[Message, Tree]:
        values, owed, body, rest = coded(message, link), memory.get("owed", {}), dict(message.body), {}
        due = lowered(owed, values, link) if owed else {}
        for name, value in values.items():
            total = summed(value, due.get(name), name)
            n, at = total.numel(), largest(total, share(total.numel(), self.ratio))
            top = total[at]
            size = (top.abs() / max(len(top), 1)).sum(0, keepdim=True)[: len(top)]
            written = {"value": size, "signs": bits(top < 0), "at": pack(at, n, self.positions)}
            body[name] = body[name] | written
            rest[name] = total.index_copy_(0, at, top - ternary(size, top < 0)).view(value.shape)
        return replace(message, body=body), {"owed": lifted(rest, owed, link)}

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k for k, e in message.body.items() if "at" in e}
        return {k: torch.Size([min(1, s.numel())]) if k in cut else s for k, s in shapes.items()}

    def decode(self, message: Message, link: Link) -> Message:
        body = {}
        for name, entry in message.body.items():
            shape, dtype = link.shapes[name], link.like[name].dtype
            n, k = shape.numel(), share(shape.numel(), self.ratio)
            if ("at" in entry) != ("signs" in entry):
                refuse(f"has signs of {name} without positions, or positions without signs")
            if "at" not in entry:
                body[name] = entry | {"value": fitting(entry["value"], shape, dtype, name)}
                continue
            size = fitting(entry["value"], torch.Size([min(1, n)]), dtype, name)
            if (size < 0).any():
                refuse(f"has a size of {name} below 0")
            values, at = ternary(size, mask_of(entry["signs"], k)), unpack(entry["at"], n, k, self.positions)
            body[name] = without(entry, "at", "signs") | {"value": placed(values, at, shape)}
        return replace(message, body=body)

    def error(self, value: Tensor) -> Tensor:
        return value.abs().max().expand(value.shape) if value.numel() else value


def ternary(size: Tensor, negative: Tensor) -> Tensor:
    return torch.where(negative, -size, size)
