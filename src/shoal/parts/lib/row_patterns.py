"""Dropping patterns of weight rows: which rows can be dropped, which are kept, and how the kept ones travel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import floor

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Plan
from shoal.core.wire import Entry, Message, pack_bits, unpack_bits
from shoal.parts.lib.submodel_units import list_rows_of_kinds


def list_droppable_rows(net: Net, tie_gates: bool, output: bool) -> list[Axis]:
    """The groups of rows that may drop: the units of a model, or of a language model the rows of some matrices.

    Those are the embedding, the output layer and the recurrent matrices, by gate or, with `tie_gates`, by cell;
    `output` adds the rows of the output layer of any model.
    """
    kinds = {"embedding", "output", "cells" if tie_gates else "recurrent"} if net.token_inputs else set()
    kinds |= {"output"} if output else set()
    return [*(() if net.token_inputs else net.axes), *list_rows_of_kinds(net, kinds)]


def count_kept_rows(size: int, rate: float) -> int:
    """How many rows of a matrix are kept: J - round(rate J), halves rounded up, and at least one."""
    return max(1, size - floor(rate * size + 0.5))


def pick_row_pattern(scores: Tensor | None, size: int, rate: float, generator: torch.Generator) -> Tensor:
    """beta: 1 for the rows that scored best, 0 for the others; at random where there are no scores, or equal ones.

    Printed is a threshold at the p-quantile of the scores; they are whole numbers and mostly equal, so that a threshold
    could keep no row at all.
    """
    order = torch.randperm(size, generator=generator)
    if scores is not None:
        order = order[scores.cpu()[order].argsort(descending=True, stable=True)]
    return torch.zeros(size).index_fill(0, order[: count_kept_rows(size, rate)], 1.0)


@lru_cache(256)
def make_blank_pattern(size: int) -> Tensor:
    """Zeros in the place of a pattern that is not needed; shared, so nobody may write to it."""
    return torch.zeros(size)


def plan_kept_rows(kept: Mapping[str, Tensor]) -> Plan:
    """The plan of a model that holds the rows of these patterns."""
    return Plan({name: own.cpu().nonzero().flatten() for name, own in kept.items()})


def cut_rows(message: Message, lines: Callable[[str], Mapping[int, Tensor]]) -> Message:
    """The message with only the kept rows and columns of every value; each pattern travels once, one bit a line.

    `lines` gives by tensor name and dimension which lines are kept.
    """
    seen: list[tuple[str, Tensor]] = []
    body: dict[str, Entry] = {}
    for name, entry in message.body.items():
        value, patterns = entry["value"], {}
        for dim, line in lines(name).items():
            value = value.index_select(dim, line.nonzero().flatten().to(value.device))
            known = next((place for place, other in seen if torch.equal(other, line)), None)
            patterns |= (
                {f"kept {dim}": pack_bits(line)} if known is None else {f"kept {dim} as {known}": torch.empty(0).byte()}
            )
            seen.append((f"{dim} {name}", line))
        body[name] = entry | {"value": value} | patterns
    return replace(message, body=body)


def read_row_patterns(name: str, body: Mapping[str, Entry], shapes: Mapping[str, torch.Size]) -> dict[int, Tensor]:
    """By dimension, which lines of a tensor were kept, as the message says."""
    patterns: dict[int, Tensor] = {}
    for key, value in body[name].items():
        if not key.startswith("kept "):
            continue
        dim, _, place = key.removeprefix("kept ").partition(" as ")
        owner_dim, _, owner = (place or f"{dim} {name}").partition(" ")
        shape, value = shapes.get(owner, ()), body.get(owner, {}).get(f"kept {owner_dim}")
        if value is None or not (dim + owner_dim).isdecimal() or int(owner_dim) >= len(shape):
            raise make_row_error(name, f"a pattern {key[:40]!r} of nothing")
        length = shape[int(owner_dim)]
        if value.dtype != torch.uint8 or value.shape != (-(-length // 8),):
            raise make_row_error(name, f"a pattern of {value.numel()} bytes for {length} rows")
        line = unpack_bits(value, torch.Size([length]))
        if not torch.equal(pack_bits(line), value):
            raise make_row_error(name, "a pattern with more bits than rows")
        patterns[int(dim)] = line
    return patterns


def compute_cut_shapes(shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
    """The shapes of the values after `cut_rows`."""
    cut = dict(shapes)
    for name in message.body:
        for dim, line in read_row_patterns(name, message.body, shapes).items():
            cut[name] = torch.Size([int(line.sum()) if d == dim else n for d, n in enumerate(cut[name])])
    return cut


def restore_rows(message: Message, shapes: dict[str, torch.Size], covers: bool) -> Message:
    """The message with values of their whole shapes, 0 in dropped rows; with `covers` these are marked as not held."""
    body: dict[str, Entry] = {}
    after = compute_cut_shapes(shapes, message)
    for name, entry in message.body.items():
        rest = {k: v for k, v in entry.items() if not k.startswith("kept ")}
        lines = read_row_patterns(name, message.body, shapes)
        if entry["value"].shape != after[name]:
            raise make_row_error(
                name, f"values of shape {tuple(entry['value'].shape)} where {tuple(after[name])} are due"
            )
        if lines:
            full, mask = entry["value"], torch.ones((), dtype=torch.bool, device=entry["value"].device)
            for dim, line in lines.items():
                line = line.to(full.device)
                wide = full.new_zeros([len(line) if d == dim else n for d, n in enumerate(full.shape)])
                full = wide.index_copy_(dim, line.nonzero().flatten(), full)
                mask = mask & line.view([-1 if d == dim else 1 for d in range(full.dim())])
            rest |= {"value": full} | ({"covered": mask.expand(shapes[name])} if covers else {})
        body[name] = rest
    return replace(message, body=body)


def make_row_error(name: str, what: str) -> ShoalError:
    """The error that refuses a message whose patterns or rows of a tensor do not fit."""
    return ShoalError("damaged", f"A message has {what} in {name}, which does not fit.", "It was not used.")


def find_row_tensors(kept: Sequence[Axis]) -> set[str]:
    """The names of the tensors that these rows cut."""
    return {cut.tensor for axis in kept for cut in axis.cuts}
