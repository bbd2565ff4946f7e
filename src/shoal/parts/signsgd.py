"""SignSGD with majority vote: a bit per element travels, and most decide (Bernstein et al. 2018, arXiv:1802.04434)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Reply, Round
from shoal.core.wire import CodecLink, Message, pack_bits
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import unpack_bitmap
from shoal.parts.lib.sparse_codec import check_finite_values, check_tensor_fits, select_coded_values


@dataclass(frozen=True)
class SignSGD(Part):
    """Devices send the signs of their updates, and the model moves by lr along the sign of the majority.

    w = anchor + lr sign(sum of signs); where as many say plus as minus, nothing moves.
    """

    cite: ClassVar = ("bernstein2018signsgd",)
    reads: ClassVar = frozenset({"updates"})
    stage: ClassVar = "quantise"

    lr: float = 0.01

    def __post_init__(self):
        require(self, "lr > 0", self.lr > 0)

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        values = {k: pack_bits(check_finite_values(v, k) >= 0) for k, v in select_coded_values(message, link).items()}
        return message.with_values(**values), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        cut = {k for k, e in message.body.items() if e["value"].dtype == torch.uint8}
        return {k: torch.Size([(s.numel() + 7) // 8]) if k in cut else s for k, s in shapes.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        body = {}
        for name, entry in message.body.items():
            shape, dtype, value = link.shapes[name], link.like[name].dtype, entry["value"]
            if value.dtype == torch.uint8 and dtype.is_floating_point:
                value = unpack_bitmap(value, shape.numel()).to(dtype).mul_(2).sub_(1).view(shape)
            body[name] = entry | {"value": check_tensor_fits(value, shape, dtype, name)}
        return replace(message, body=body)

    def error(self, value: Tensor) -> Tensor:
        return (value - torch.where(value >= 0, 1.0, -1.0)).abs()

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        voters = [r for r, w in zip(replies, round.weights.tolist(), strict=True) if w > 0]
        moved = {k: self.lr * take_majority_vote(k, voters).to(round.anchor[k]) for k in round.net.shared_trainable}
        return average_replies(round) | {k: round.anchor[k] + m for k, m in moved.items()}, state


def take_majority_vote(name: str, voters: Sequence[Reply]) -> Tensor:
    """The sign that most of those have who hold an element; 0 in a tie. Who sent nothing for it has no vote."""
    signs = [r.delta[name].sign() * r.covered.get(name, 1) for r in voters if name in r.delta]
    return torch.stack(signs).sum(0).sign() if signs else torch.zeros(())
