"""Sparse Ternary Compression: the top elements by sign and one common size (Sattler et al. 2019, arXiv:1903.02891)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Round
from shoal.core.wire import CodecLink, Message, pack_bits
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import (
    POSITION_CODES,
    pack_positions,
    refuse_message,
    unpack_bitmap,
    unpack_positions,
)
from shoal.parts.lib.sparse_codec import (
    add_owed,
    check_tensor_fits,
    count_sent_elements,
    drop_entry_fields,
    find_largest,
    lift_codec_memory,
    lower_codec_memory,
    place_values,
    select_coded_values,
)


@dataclass(frozen=True)
class STC(Part):
    """Sends the largest elements of each tensor as their signs and one common size; the rest is added to the next.

    `ratio` is the share of elements sent. `positions` is how their places are written: `64` or `32` bits each,
    `golomb`, `bitmap`, or `auto`, the smallest of these. With `down` the server's own change of the model is coded so
    as well, and the server adds the rest to its next change.
    """

    cite: ClassVar = ("sattler2019stc",)
    stage: ClassVar = "sparsify"

    ratio: float = 0.0025
    positions: str = "64"
    down: bool = False

    def __post_init__(self):
        require(
            self,
            f"0 < ratio <= 1 and positions in {POSITION_CODES}",
            0 < self.ratio <= 1 and self.positions in POSITION_CODES,
        )

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values, owed, body, rest = select_coded_values(message, link), memory.get("owed", {}), dict(message.body), {}
        due = lower_codec_memory(owed, values, link) if owed else {}
        for name, value in values.items():
            total = add_owed(value, due.get(name), name)
            at, size, negative = self.ternarise(total)
            written = {
                "value": size,
                "signs": pack_bits(negative),
                "at": pack_positions(at, total.numel(), self.positions),
            }
            body[name] = body[name] | written
            rest[name] = total.index_add_(0, at, build_ternary_values(size, negative), alpha=-1).view(value.shape)
        return replace(message, body=body), {"owed": lift_codec_memory(rest, owed, link)}

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k for k, e in message.body.items() if "at" in e}
        return {k: torch.Size([min(1, s.numel())]) if k in cut else s for k, s in shapes.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        body = {}
        for name, entry in message.body.items():
            shape, dtype = link.shapes[name], link.like[name].dtype
            n, k = shape.numel(), count_sent_elements(shape.numel(), self.ratio)
            if ("at" in entry) != ("signs" in entry):
                refuse_message(f"has signs of {name} without positions, or positions without signs")
            if "at" not in entry:
                body[name] = entry | {"value": check_tensor_fits(entry["value"], shape, dtype, name)}
                continue
            size = check_tensor_fits(entry["value"], torch.Size([min(1, n)]), dtype, name)
            if (size < 0).any():
                refuse_message(f"has a size of {name} below 0")
            values, at = (
                build_ternary_values(size, unpack_bitmap(entry["signs"], k)),
                unpack_positions(entry["at"], n, k, self.positions),
            )
            body[name] = drop_entry_fields(entry, "at", "signs") | {"value": place_values(values, at, shape)}
        return replace(message, body=body)

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        if not self.down:
            return params, state
        owed, model = dict(state.get("owed", {})), dict(params)
        for name in round.net.names_with_role("shared", "server"):
            if name in round.net.trainable:
                before = round.anchor[name]
                total = add_owed(params[name] - before, owed.get(name), name)
                at, size, negative = self.ternarise(total)
                change = build_ternary_values(size, negative)
                model[name] = before.flatten().index_add(0, at, change).view(before.shape)
                owed[name] = total.index_add_(0, at, change, alpha=-1).view(before.shape)
        return model, {"owed": owed}

    def ternarise(self, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the largest elements are, their mean size, and which of them are below 0."""
        at = find_largest(total, count_sent_elements(total.numel(), self.ratio))
        top = total[at]
        return at, (top.abs() / max(len(top), 1)).sum(0, keepdim=True)[: len(top)], top < 0

    def error(self, value: Tensor) -> Tensor:
        return value.abs().max().expand(value.shape) if value.numel() else value


def build_ternary_values(size: Tensor, negative: Tensor) -> Tensor:
    return torch.where(negative, -size, size)
