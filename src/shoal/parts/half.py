"""Half precision on the wire: values travel in 2 bytes."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.core.wire import CodecLink, Message
from shoal.parts.lib.checks import require
from shoal.parts.lib.sparse_codec import check_finite_values, check_tensor_fits

HALF_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Half(Part):
    """Values travel in 2 bytes, as float16 or bfloat16.

    `kind` says which; what is too large for it becomes the largest number that it has. `down` codes what is sent to
    devices too.
    """

    cite: ClassVar = ()
    stage: ClassVar = "quantise"
    codes_delta: ClassVar = False

    kind: str = "float16"
    down: bool = False

    def __post_init__(self):
        require(self, f"kind in {tuple(HALF_DTYPES)}", self.kind in HALF_DTYPES)

    @property
    def directions(self) -> frozenset[str]:
        return frozenset({"up", "down"}) if self.down else frozenset({"up"})

    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        dtype = HALF_DTYPES[self.kind]
        top = torch.finfo(dtype).max
        values = {
            k: check_finite_values(e["value"], k) for k, e in message.body.items() if e["value"].is_floating_point()
        }
        return message.with_values(**{k: v.clamp(-top, top).to(dtype) for k, v in values.items()}), memory

    def decode(self, message: Message, link: CodecLink) -> Message:
        body = {}
        for name, entry in message.body.items():
            like = link.like[name]
            dtype = HALF_DTYPES[self.kind] if like.is_floating_point() else like.dtype
            body[name] = entry | {
                "value": check_tensor_fits(entry["value"], link.shapes[name], dtype, name).to(like.dtype)
            }
        return replace(message, body=body)

    def error(self, value: Tensor) -> Tensor:
        info = torch.finfo(HALF_DTYPES[self.kind])
        step = value.abs().clamp(info.tiny, info.max) * info.eps * 0.501
        return step + (value.abs() - info.max).clamp(min=0)
