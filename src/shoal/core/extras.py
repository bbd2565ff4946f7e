"""The declaration of an extra: what a device sends beside the model, or adds to its enrolment card, and in which form.

A part declares its extras in `declare_extras` and `declare_card`. The server compares every answer with that before a
part sees it, so that an answer of another form costs its device the round and never the run.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.wire import unpack_bits

LIKENESSES = ("number", "params", "axes", "classes", "bits", "tensor")
CROWDS = ("", "sum", "mean")
READABLE = ("updates", "extras", "cards", "sizes", "outcomes")
"""What a part may read on the server, as its `reads` calls it."""
LARGEST = 1e18
"""Where no range is declared, numbers beyond this are refused: float32 cannot hold their squares."""


@dataclass(frozen=True)
class Extra:
    """What one extra is: like what, of which type, in which range, when it is sent, and how much the server needs.

    `like` is one of
    number    one number
    params    a dict with a tensor for every parameter that devices train and share, cut by the plan as these are
    axes      a dict with one number per unit for every axis of the model, cut by the plan
    classes   one number per class
    bits      one bit for each of `length` things, eight in a byte, as `pack_bits` makes them
    tensor    a tensor of `shape`, where None is any length
    """

    like: str = "number"
    kind: str = "float"
    """float, int, bool, or the name of a torch type such as float32; params have the types of the model."""
    low: float = -LARGEST
    high: float = LARGEST
    shape: tuple[int | None, ...] = ()
    length: int = 0
    most: int = 1 << 20
    """The most elements of a tensor with a side of any length."""
    rows: str = ""
    """The extra whose elements other than 0 the first side counts: a mean for each class that a device holds, say."""
    when: str = ""
    """The request that it answers (a name in what `send` sends); "" where it is always sent."""
    optional: bool = False
    """Whether a device may leave it out."""
    crowd: str = ""
    """How much of it the server needs: "" every single value, else only the "sum" or the "mean" over the devices."""
    about: str = ""
    """What it tells, in a few words, for the audit."""

    def __post_init__(self):
        for field, value, known in (("like", self.like, LIKENESSES), ("crowd", self.crowd, CROWDS)):
            if value not in known:
                raise ValueError(f"an Extra has {field} = {value!r}; known are {', '.join(map(repr, known))}")
        if self.kind not in ("float", "int", "bool") and not isinstance(getattr(torch, self.kind, None), torch.dtype):
            raise ValueError(f"an Extra has kind = {self.kind!r}; known are float, int, bool and the types of torch")


Declaration = Mapping[str, Extra]
"""The extras of one part, by their names."""


def find_fault(entries: Any, declared: Declaration, asked: Collection[str], net: Net, plan: Plan) -> str:
    """What is wrong with a part's extras as they travel (cut by the plan), in words; "" where they are as declared.

    `asked` are the requests that the part sent to the device.
    """
    if not isinstance(entries, Mapping):
        return "they are no dict of names"
    for name in entries:
        if name not in declared:
            return f"{str(name)[:40]!r} is none of its extras"
    for name, extra in declared.items():
        due = not extra.when or extra.when in asked
        if name not in entries:
            if due and not extra.optional:
                return f"{name!r} is missing"
            continue
        what = find_value_fault(entries[name], extra, net, plan) if due else "nobody asked for it"
        if what:
            return f"{name!r}: {what}"
    return find_rows_fault(entries, declared)


def find_value_fault(value: Any, extra: Extra, net: Net, plan: Plan) -> str:
    """What is wrong with one extra, in words; "" where it is as declared."""
    if extra.like in ("params", "axes"):
        shapes = list_param_forms(net, plan) if extra.like == "params" else list_axis_forms(net, plan, extra)
        named = "parameters" if extra.like == "params" else "axes"
        if not isinstance(value, Mapping) or set(value) != set(shapes):
            return f"it does not have the names of the {named}"
        tensors = {name: value[name] for name in shapes}
    else:
        shapes, tensors = {"": (make_shape(extra, net), make_kind(extra))}, {"": value}
    for name, (shape, kind) in shapes.items():
        what = find_form_fault(tensors[name], shape, kind, extra.most)
        if what:
            return f"{name} {what}" if name else f"it {what}"
    if not is_within(list(tensors.values()), extra.low, extra.high):
        bounds = f"{extra.low:g} to {extra.high:g}"
        return f"it has numbers outside {bounds}"
    return ""


Form = tuple[tuple[int | None, ...], str]
"""A shape, in which None is any length, and a kind of numbers."""


def list_param_forms(net: Net, plan: Plan) -> dict[str, Form]:
    """By parameter that devices train and share, its form as the plan cuts it."""
    cut = net.slicer.take({k: net.initial[k] for k in net.shared_trainable}, plan)
    return {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in cut.items()}


def list_axis_forms(net: Net, plan: Plan, extra: Extra) -> dict[str, Form]:
    """By axis, as many numbers as the plan keeps units."""
    return {a.name: ((len(plan.kept.get(a.name, range(a.size))),), extra.kind) for a in net.axes}


def make_shape(extra: Extra, net: Net) -> tuple[int | None, ...]:
    """The shape of an extra that is one tensor."""
    shapes = {"classes": (net.classes,), "bits": (-(-extra.length // 8),), "tensor": extra.shape}
    return shapes.get(extra.like, ())


def make_kind(extra: Extra) -> str:
    return "uint8" if extra.like == "bits" else extra.kind


def find_form_fault(value: Any, shape: tuple[int | None, ...], kind: str, most: int) -> str:
    """How a value differs from a tensor of this shape and kind, as the end of a sentence; "" where it does not."""
    if not isinstance(value, Tensor):
        return "is no tensor"
    found, wanted = tuple(value.shape), " x ".join("any" if n is None else str(n) for n in shape) or "one number"
    if len(found) != len(shape) or any(n is not None and n != length for n, length in zip(shape, found)):
        return f"has the shape {found} and not {wanted}"
    if None in shape and value.numel() > most:
        return f"has {value.numel()} elements, more than {most}"
    if not is_of_kind(value, kind):
        return f"holds {str(value.dtype).removeprefix('torch.')} and not {kind}"
    return ""


def is_of_kind(value: Tensor, kind: str) -> bool:
    """Whether the numbers of a tensor are of a kind: float, int, bool or a type of torch."""
    if kind == "float":
        return value.is_floating_point()
    if kind == "int":
        return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    return value.dtype == getattr(torch, kind)


def is_within(tensors: list[Tensor], low: float, high: float) -> bool:
    """Whether all numbers lie from `low` to `high`; what is no number does not. One synchronisation on a GPU."""
    ends = [torch.stack(t.aminmax()).double() for t in tensors if t.numel() and t.dtype != torch.bool]
    if not ends:
        return True
    least, greatest = torch.stack(ends).cpu().unbind(1)
    return bool((least >= low).all()) and bool((greatest <= high).all())


def find_rows_fault(entries: Mapping[str, Any], declared: Declaration) -> str:
    """Which tensor has another number of rows than the extra that counts them says; "" where none has."""
    for name, extra in declared.items():
        if extra.rows and name in entries:
            counter, counted = declared[extra.rows], entries[extra.rows]
            marks = unpack_bits(counted, torch.Size([counter.length])) if counter.like == "bits" else counted
            rows = int(marks.count_nonzero())
            if len(entries[name]) != rows:
                return f"{name!r}: it has {len(entries[name])} rows, and {extra.rows!r} says {rows}"
    return ""
