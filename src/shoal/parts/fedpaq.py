"""FedPAQ: updates are rounded at random to a few levels, without bias (Reisizadeh et al. 2020, arXiv:1909.13014)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.metric import Metric
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import SERVER, Round
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.position_codec import refuse_message
from shoal.parts.lib.sparse_codec import check_finite_values, check_tensor_fits, drop_entry_fields, select_coded_values

WIDTHS = (2, 4, 8, 16)
BLOCK = 1 << 15
"""Elements that stay in a processor's cache."""


@dataclass(frozen=True)
class FedPAQ(Part):
    """Rounds each element at random, without bias, to one of 2^bits - 1 levels.

    The levels lie evenly between plus and minus the largest element of its tensor.
    """

    cite: ClassVar = ("reisizadeh2020fedpaq",)
    stage: ClassVar = "quantise"
    reads: ClassVar = frozenset({"updates"})
    metrics: ClassVar = (
        Metric(
            "coding_error",
            "largest error of rounding over the size of an update",
            drawn=True,
            about="mean over replies of the 2-norm of the largest error that rounding can have made, over that of the "
            "update as it was decoded. A server cannot know the error that was made: the update before rounding stays "
            "on the device",
        ),
    )

    bits: int = 8

    def __post_init__(self):
        require(self, f"bits in {WIDTHS}", self.bits in WIDTHS)

    @property
    def levels(self) -> int:
        """Levels above 0."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        body, generator = dict(message.body), link.generator()
        for name, value in select_coded_values(message, link).items():
            scale = (
                torch.stack(check_finite_values(value, name).aminmax()).abs().max()
                if value.numel()
                else value.new_zeros(())
            )
            seed = int(torch.randint(2**62, (), generator=generator))
            level = round_stochastically(value.flatten().cpu().numpy(), scale.item(), self.levels, seed)
            packed = self.pack_levels(level, value.shape).to(value.device)
            body[name] = body[name] | {"value": packed, "scale": scale.view(1)}
        return replace(message, body=body), memory

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        if self.bits >= 8:
            return shapes
        cut = {k for k, e in message.body.items() if "scale" in e}
        return {k: torch.Size([-(-s.numel() * self.bits // 8)]) if k in cut else s for k, s in shapes.items()}

    def decode(self, message: Message, link: CodecLink) -> Message:
        body = {}
        for name, entry in message.body.items():
            shape, dtype = link.shapes[name], link.like[name].dtype
            if "scale" not in entry:
                body[name] = entry | {"value": check_tensor_fits(entry["value"], shape, dtype, name)}
                continue
            scale = check_tensor_fits(entry["scale"], torch.Size([1]), dtype, name)
            level = self.unpack_levels(entry["value"], shape, name)
            if (scale < 0).any() or (level.numel() and not -self.levels <= int(level.min())):
                refuse_message(f"has levels or a scale of {name} that do not exist")
            body[name] = drop_entry_fields(entry, "scale") | {"value": level.to(dtype).div_(self.levels).mul_(scale[0])}
        return replace(message, body=body)

    def error(self, value: Tensor) -> Tensor:
        return (value.abs().max() / self.levels).expand(value.shape) if value.numel() else value

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """Nothing but tells the error; the largest element of a tensor is decoded exactly, so that `error` is known."""
        replies = [r for r in round.replies if r.device != SERVER]
        shares = []
        for reply in replies:
            values = [reply.delta[k] for k in round.net.shared_trainable if k in reply.delta and reply.delta[k].numel()]
            errors = [value.abs().max().double() / self.levels * value.numel() ** 0.5 for value in values]
            sizes = [torch.linalg.vector_norm(value, dtype=torch.float64) for value in values]
            if values:
                shares.append(torch.stack(errors).norm() / torch.stack(sizes).norm().clamp(min=1e-30))
        round.tell("coding_error", torch.stack(shares).mean() if shares else 0.0)
        return params, state

    def pack_levels(self, level: Tensor, shape: torch.Size) -> Tensor:
        """Levels in as few bytes as they need; several to a byte below 8 bits."""
        if self.bits >= 8:
            return level.view(shape)
        per = 8 // self.bits
        codes = (level.to(torch.int16) + self.levels + 1).to(torch.uint8)
        codes = torch.cat((codes, codes.new_zeros(-codes.numel() % per))).view(-1, per)
        return sum((codes[:, i] << (self.bits * i) for i in range(1, per)), codes[:, 0])

    def unpack_levels(self, value: Tensor, shape: torch.Size, name: str) -> Tensor:
        """The levels that `packed` wrote."""
        if self.bits >= 8:
            return check_tensor_fits(value, shape, torch.int8 if self.bits == 8 else torch.int16, name)
        n, per = shape.numel(), 8 // self.bits
        value = check_tensor_fits(value, torch.Size([-(-n // per)]), torch.uint8, name)
        codes = torch.stack([value >> (self.bits * i) & (2**self.bits - 1) for i in range(per)], 1).flatten()
        if codes[n:].any():
            refuse_message(f"has more levels of {name} than elements")
        return (codes[:n].to(torch.int16) - self.levels - 1).view(shape)


def round_stochastically(flat: np.ndarray, largest: float, levels: int, seed: int) -> Tensor:
    """Whole numbers from -levels to levels, of which flat / largest * levels is expected; block by block."""
    rounded = torch.zeros(len(flat), dtype=torch.int8 if levels < 128 else torch.int16)
    generator, written = np.random.Generator(np.random.SFC64(seed)), rounded.numpy()
    for start in range(0, len(flat) if largest else 0, BLOCK):
        x = flat[start : start + BLOCK] / flat.dtype.type(largest)
        x *= levels
        x += generator.random(len(x), dtype=x.dtype)
        written[start : start + BLOCK] = np.clip(np.floor(x, out=x), -levels, levels, out=x)
    return rounded
