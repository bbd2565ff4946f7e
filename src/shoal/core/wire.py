"""Messages between the server and devices, the chain of codecs that compresses them, and their size in bytes.

A message has a body (the model on its way down, a delta on the way up) and what parts send beside it. A codec replaces
the `value` of each entry of the body by a smaller one and stores what it needs to undo that in the same entry, under a
key of its own, so that codecs can be chained. Decoding runs the chain backwards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.plan import Axis, Plan, Slicer
from shoal.core.model.tree import Params, Tree
from shoal.core.streams import RandomStreams, part_stream_name

if TYPE_CHECKING:
    from shoal.core.part import Part

Entry: TypeAlias = dict[str, Tensor]
"""One tensor as it travels: its `value`, and what codecs store beside it under their own keys."""
STAGES = ("rows", "sparsify", "quantise", "pack")
"""The order in which codecs run; a method has at most one of each."""
REQUEST = torch.ones((), dtype=torch.bool)
"""What a part's `send` gives a name to in order to ask devices for something; it costs one byte."""


@dataclass(frozen=True, eq=False)
class Message:
    """What travels in one direction between the server and one device."""

    body: dict[str, Entry]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By part: named tensors, or trees of them keyed by parameter names."""

    @cached_property
    def bytes_by(self) -> dict[str, int]:
        """Bytes by cause: the model, and each part that sends something beside it."""
        nbytes = {"model": sum(tensor.nbytes for entry in self.body.values() for tensor in entry.values())}
        for part, extras in self.beside.items():
            nbytes[part.removeprefix(".")] = tree.count_tree_bytes(extras)
        return nbytes

    @cached_property
    def nbytes(self) -> int:
        return sum(self.bytes_by.values())

    def to_bytes(self) -> bytes:
        """The bytes of all tensors in order, without names and shapes, which follow from the plan and the method."""
        return b"".join(
            copy_tensor_bytes(t) for t in (*tree.collect_tensors(self.body), *tree.collect_tensors(self.beside))
        )

    def with_values(self, **values: Tensor) -> "Message":
        """The same message with other values, by tensor name."""
        return replace(self, body={k: e | {"value": values[k]} if k in values else e for k, e in self.body.items()})


@dataclass(frozen=True, eq=False)
class CodecLink:
    """What a codec knows about the link it works on: direction, device, round, plan, and the message so far."""

    direction: str
    device: int
    round: int
    plan: Plan
    slicer: Slicer
    streams: RandomStreams
    like: Params
    """Tensors of the full shapes, by name; only their shapes and types are used."""
    trained: frozenset[str] | None = None
    """The tensors that are trained (None: all); the others are counters and running statistics."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """The shapes of the values before the codec codes them."""
    part: str = ""
    message: Message | None = None
    """The message that the codec is about to code."""
    earlier: tuple["Part", ...] = ()
    """The codecs that the message went through before."""
    memory: Tree = field(default_factory=dict)
    """The codec's memory on the device, where a device decodes."""
    known: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """A cache of `find_positions`, by codec and tensor."""
    blocks: tuple[tuple[str, ...], ...] = ()
    """The names of the tensors of a whole message, block by block, where the model has blocks."""

    def generator(self) -> torch.Generator:
        """A generator at the start of the codec's stream for this link and round; both ends draw the same numbers."""
        return self.streams.make_torch_generator(part_stream_name(self.part, self.direction), self.round, self.device)

    def expand_to_full(self, values: Params) -> Params:
        """Values as this codec sees them, at full shape; 0 for elements that the plan or an earlier codec left out."""
        if not self.earlier:
            return self.slicer.place(values, self.like, self.plan)
        expanded = {}
        for name, value in values.items():
            full = value.new_zeros(self.like[name].numel())
            expanded[name] = full.index_copy_(0, self.find_positions(name), value.flatten()).view(self.like[name].shape)
        return expanded

    def reduce_from_full(self, full: Params) -> Params:
        """The inverse of `expand_to_full`: of tensors at full shape, the elements that this codec sees.

        Codecs keep their memory (what error feedback still owes) at full shape, since plans change between rounds.
        """
        assert self.message is not None
        if not self.earlier:
            return self.slicer.take(full, self.plan)
        shapes = {k: self.message.body[k]["value"].shape for k in full}
        return {k: v.flatten()[self.find_positions(k)].view(shapes[k]) for k, v in full.items()}

    def find_positions(self, name: str) -> Tensor:
        """The flat indices, in the tensor of full shape, of the numbers that this codec sees of it.

        They are found by decoding 1, 2, 3, ... through the earlier codecs and looking where each number arrives.
        """
        assert self.message is not None
        if (self.part, name) not in self.known:
            value = self.message.body[name]["value"]
            ramp = torch.arange(1, value.numel() + 1, dtype=torch.float64, device=value.device).view(value.shape)
            message = decode_message(self.message.with_values(**{name: ramp}), self.earlier, self)
            placed = self.slicer.place({name: message.body[name]["value"]}, self.like, self.plan)[name].flatten()
            filled = placed.nonzero().flatten()
            ranks = placed[filled]
            is_ordered = bool((ranks[1:] > ranks[:-1]).all())
            self.known[self.part, name] = filled if is_ordered else filled[ranks.argsort()]
        return self.known[self.part, name]


def pack_message(
    params: Mapping[str, Tensor], beside: dict[str, dict[str, Any]], plan: Plan, slicer: Slicer, names: Sequence[str]
) -> Message:
    """A message with the named tensors, cut by the plan, before any codec; what parts send beside it is cut too."""
    named = {k: params[k] for k in names}
    body = slicer.take(named, plan) if plan else named
    cut = lambda t: slicer.take(t, plan), lambda t: slicer.take_units(t, plan)
    return Message(
        {k: {"value": v} for k, v in body.items()},
        {part: _map_named_trees(extras, slicer, *cut) for part, extras in beside.items()},
    )


def unpack_message(
    message: Message, like: Params, plan: Plan, slicer: Slicer
) -> tuple[Params, dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Values at full shape, masks of the elements that arrived (where not all did), and what came beside."""
    values, covered = {}, {}
    for name, entry in message.body.items():
        if not plan and "covered" not in entry:
            values[name] = entry["value"]
            continue
        values[name] = slicer.place({name: entry["value"]}, like, plan)[name]
        mask = slicer.covered_mask(name, like[name], plan)
        if "covered" in entry:
            arrived = slicer.place({name: entry["covered"]}, {name: like[name].bool()}, plan)[name]
            mask = arrived if mask is None else mask & arrived
        if mask is not None:
            covered[name] = mask
    place = lambda t: slicer.place(t, like, plan), lambda t: slicer.place_units(t, plan)
    return values, covered, {part: _map_named_trees(extras, slicer, *place) for part, extras in message.beside.items()}


def encode_message(
    message: Message, codecs: Sequence["Part"], memories: dict[str, Tree], link: CodecLink
) -> tuple[Message, dict[str, Tree]]:
    """The message after every codec, in the order of stages, and the new memories by codec."""
    shapes = compute_sliced_shapes(message, link)
    for number, part in enumerate(codecs):
        codec_link = replace(link, shapes=shapes, part=part.name(), message=message, earlier=tuple(codecs[:number]))
        message, memory = part.encode(message, memories.get(part.name(), {}), codec_link)
        memories = memories | {part.name(): memory}
        shapes = part.outline(shapes, message)
    return message, memories


def decode_message(
    message: Message, codecs: Sequence["Part"], link: CodecLink, memories: Mapping[str, Tree] = MappingProxyType({})
) -> Message:
    """The message decoded by every codec, last first; elements that did not travel are 0, or marked as not covered."""
    for name, entry in message.body.items():
        if name not in link.like or not isinstance(entry.get("value"), Tensor):
            raise ShoalError("damaged", f"A message has no values for {name[:80]!r}.", "It was not used.")
    shapes = [compute_sliced_shapes(message, link)]
    for part in codecs:
        shapes.append(part.outline(shapes[-1], message))
    for part, before in zip(reversed(codecs), reversed(shapes[:-1])):
        codec_link = replace(link, shapes=before, part=part.name(), memory=memories.get(part.name(), {}))
        message = part.decode(message, codec_link)
    return message


def compute_sliced_shapes(message: Message, link: CodecLink) -> dict[str, torch.Size]:
    """The shapes of a message's values before any codec, as the plan cuts them."""
    return {k: v.shape for k, v in link.slicer.take({k: link.like[k] for k in message.body}, link.plan).items()}


def encode_plan(plan: Plan, axes: Sequence[Axis]) -> dict[str, Tensor]:
    """A plan as it travels: a bit per unit of the axes that it cuts, a bit per element of the tensors that it masks."""
    units = [
        torch.zeros(a.size, dtype=torch.bool).index_fill(0, plan.kept[a.name].cpu(), True)
        for a in axes
        if a.name in plan.kept
    ]
    masks = [mask.flatten().cpu() for mask in plan.masks.values()]
    return {"bits": pack_bits(torch.cat([*units, *masks]))}


def pack_bits(mask: Tensor) -> Tensor:
    """A boolean tensor as bytes, eight elements in each."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy())).to(mask.device)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The boolean tensor of this shape that `pack_bits` packed."""
    flat = np.unpackbits(packed.cpu().numpy(), count=shape.numel())
    return torch.from_numpy(flat.astype(bool)).view(shape).to(packed.device)


def copy_tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _map_named_trees(value: Any, slicer: Slicer, f: Callable[[Params], Params], g: Callable[[Params], Params]) -> Any:
    """Apply `f` to each dict keyed by names of tensors, and `g` to each keyed by names of axes, at any depth."""
    if not isinstance(value, Mapping):
        return value
    if value and slicer.names.issuperset(value):
        return f(dict(value))
    if value and slicer.axes.keys() >= value.keys():
        return g(dict(value))
    return {k: _map_named_trees(v, slicer, f, g) for k, v in value.items()}
