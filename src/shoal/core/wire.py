"""What travels: messages, the pipe of codecs that shrinks them, and the bytes they really are.

A message has a body (the model on its way down, its change on the way up) and what parts send beside it. A codec reads
the `value` of each entry of the body, puts a smaller one in its place and keeps what it needs to undo that beside
it under its own name, so any codec can read what another one wrote. `decode` runs the pipe backwards.
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
STAGES = ("rows", "sparsify", "quantise", "pack")
REQUEST = torch.ones((), dtype=torch.bool)
"""A request that travels down: its name says it all, it costs one byte."""


@dataclass(frozen=True, eq=False)
class Message:
    """What travels in one direction between the server and one device."""

    body: dict[str, Entry]
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By part: named tensors, or trees of them keyed by parameter names."""

    @cached_property
    def bytes_by(self) -> dict[str, int]:
        """The bytes of each cause: the model, and each part that sends something beside it."""
        return {"model": tree.count_tree_bytes(self.body)} | {
            p.removeprefix("."): tree.count_tree_bytes(o) for p, o in self.beside.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by.values())

    def to_bytes(self) -> bytes:
        """The payload itself: the tensors' bytes in order. What they are follows from the plan and the method."""
        return b"".join(
            copy_tensor_bytes(t) for t in (*tree.collect_tensors(self.body), *tree.collect_tensors(self.beside))
        )

    def with_values(self, **made: Tensor) -> "Message":
        """The same message with other values, by tensor name."""
        return replace(self, body={k: e | {"value": made[k]} if k in made else e for k, e in self.body.items()})


@dataclass(frozen=True, eq=False)
class CodecLink:
    """The connection a codec works on: its direction, the far end, and what it is about to code or has coded."""

    direction: str
    device: int
    round: int
    plan: Plan
    slicer: Slicer
    streams: RandomStreams
    like: Params
    """Tensors of the full shapes."""
    trained: frozenset[str] | None = None
    """The tensors that are trained (None: all); the others are counters and running statistics."""
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    """The shapes of the values before the codec codes them."""
    part: str = ""
    message: Message | None = None
    """What the codec is about to code, and the codecs that it went through before."""
    earlier: tuple["Part", ...] = ()
    memory: Tree = field(default_factory=dict)
    """Where a device decodes, what the codec remembers there."""
    known: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """By codec and tensor, where what it sees belongs."""
    blocks: tuple[tuple[str, ...], ...] = ()
    """The tensors of a whole message, block by block, where the model has blocks."""

    def generator(self) -> torch.Generator:
        """The codec's own stream on this link in this round, the same at both ends."""
        return self.streams.make_torch_generator(part_stream_name(self.part, self.direction), self.round, self.device)

    def expand_to_full(self, values: Params) -> Params:
        """Values as the codec sees them, brought to full shape; 0 where the plan or an earlier codec left out."""
        if not self.earlier:
            return self.slicer.place(values, self.like, self.plan)
        made = {}
        for name, value in values.items():
            full = value.new_zeros(self.like[name].numel())
            made[name] = full.index_copy_(0, self.find_positions(name), value.flatten()).view(self.like[name].shape)
        return made

    def reduce_from_full(self, full: Params) -> Params:
        """The other way: of tensors of full shape, what the codec sees. What it owes is kept at full shape."""
        assert self.message is not None
        if not self.earlier:
            return self.slicer.take(full, self.plan)
        shapes = {k: self.message.body[k]["value"].shape for k in full}
        return {k: v.flatten()[self.find_positions(k)].view(shapes[k]) for k, v in full.items()}

    def find_positions(self, name: str) -> Tensor:
        """Where each number that the codec sees of a tensor belongs in it: what earlier codecs made of a ramp tells."""
        assert self.message is not None
        if (self.part, name) not in self.known:
            value = self.message.body[name]["value"]
            ramp = torch.arange(1, value.numel() + 1, dtype=torch.float64, device=value.device).view(value.shape)
            message = decode_message(self.message.with_values(**{name: ramp}), self.earlier, self)
            found = self.slicer.place({name: message.body[name]["value"]}, self.like, self.plan)[name].flatten()
            held = found.nonzero().flatten()
            numbers = found[held]
            rising = bool((numbers[1:] > numbers[:-1]).all())
            self.known[self.part, name] = held if rising else held[numbers.argsort()]
        return self.known[self.part, name]


def pack_message(
    params: Mapping[str, Tensor], beside: dict[str, dict[str, Any]], plan: Plan, slicer: Slicer, names: Sequence[str]
) -> Message:
    """A message about the named tensors, before any codec: only what the plan keeps is in it."""
    body = slicer.take({k: params[k] for k in names}, plan)
    taken = lambda t: slicer.take(t, plan), lambda t: slicer.take_units(t, plan)
    return Message(
        {k: {"value": v} for k, v in body.items()},
        {part: _map_named_trees(own, slicer, *taken) for part, own in beside.items()},
    )


def open_message(
    message: Message, like: Params, plan: Plan, slicer: Slicer
) -> tuple[Params, dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Values of full shape, which of their elements arrived where not all did, and what lay beside."""
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
    placed = lambda t: slicer.place(t, like, plan), lambda t: slicer.place_units(t, plan)
    return values, covered, {part: _map_named_trees(own, slicer, *placed) for part, own in message.beside.items()}


def encode_message(
    message: Message, codecs: Sequence["Part"], memories: dict[str, Tree], link: CodecLink
) -> tuple[Message, dict[str, Tree]]:
    """Through every codec in the order of their stages; each gets its own memory and returns a new one."""
    shapes = compute_sliced_shapes(message, link)
    for number, part in enumerate(codecs):
        own = replace(link, shapes=shapes, part=part.name(), message=message, earlier=tuple(codecs[:number]))
        message, memory = part.encode(message, memories.get(part.name(), {}), own)
        memories = memories | {part.name(): memory}
        shapes = part.outline(shapes, message)
    return message, memories


def decode_message(
    message: Message, codecs: Sequence["Part"], link: CodecLink, memories: Mapping[str, Tree] = MappingProxyType({})
) -> Message:
    """Backwards through the codecs; a missing coordinate comes back as 0, or as not covered where a codec says so."""
    for name, entry in message.body.items():
        if name not in link.like or not isinstance(entry.get("value"), Tensor):
            raise ShoalError("damaged", f"A message has no values for {name[:80]!r}.", "It was not used.")
    shapes = [compute_sliced_shapes(message, link)]
    for part in codecs:
        shapes.append(part.outline(shapes[-1], message))
    for part, before in zip(reversed(codecs), reversed(shapes[:-1])):
        own = replace(link, shapes=before, part=part.name(), memory=memories.get(part.name(), {}))
        message = part.decode(message, own)
    return message


def compute_sliced_shapes(message: Message, link: CodecLink) -> dict[str, torch.Size]:
    """The shapes of a message's values before any codec: they follow from the plan."""
    return {k: v.shape for k, v in link.slicer.take({k: link.like[k] for k in message.body}, link.plan).items()}


def encode_plan(plan: Plan, axes: Sequence[Axis]) -> dict[str, Tensor]:
    """A plan as it travels: a bit per unit of the axes it cuts, a bit per element where it masks."""
    units = [
        torch.zeros(a.size, dtype=torch.bool).index_fill(0, plan.kept[a.name].cpu(), True)
        for a in axes
        if a.name in plan.kept
    ]
    masks = [mask.flatten().cpu() for mask in plan.masks.values()]
    return {"bits": pack_bits(torch.cat([*units, *masks]))}


def pack_bits(mask: Tensor) -> Tensor:
    """A boolean tensor as bytes of eight."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy())).to(mask.device)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The boolean tensor of that shape that `bits` packed."""
    flat = np.unpackbits(packed.cpu().numpy(), count=shape.numel())
    return torch.from_numpy(flat.astype(bool)).view(shape).to(packed.device)


def copy_tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _map_named_trees(value: Any, slicer: Slicer, f: Callable[[Params], Params], g: Callable[[Params], Params]) -> Any:
    """Apply `f` to what is keyed by the names of tensors and `g` to what is keyed by those of axes, however deep."""
    if not isinstance(value, Mapping):
        return value
    if value and slicer.names.issuperset(value):
        return f(dict(value))
    if value and slicer.axes.keys() >= value.keys():
        return g(dict(value))
    return {k: _map_named_trees(v, slicer, f, g) for k, v in value.items()}
