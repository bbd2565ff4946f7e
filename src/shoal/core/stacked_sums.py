"""Weighted sums over replies; those that lie one behind the other in memory, as an engine left them, in one product."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.model.foreach import add_to_each


def add_weighted(sums: Sequence[Tensor], replies: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
    """Add weight * tensor of each reply to the sums, in place; a reply has one contiguous tensor for each sum."""
    for first, last in find_stacked_ranges(replies):
        if last - first == 1 or not all(total.is_contiguous() for total in sums):
            for reply, weight in zip(replies[first:last], weights[first:last]):
                add_to_each(sums, reply, weight)
            continue
        for total, top_row in zip(sums, replies[first]):
            factors = torch.tensor(weights[first:last], dtype=total.dtype, device=total.device)
            rows = top_row.as_strided((last - first, top_row.numel()), (top_row.numel(), 1))
            total.view(-1).addmv_(rows.T, factors)


def find_stacked_ranges(replies: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
    """The replies divided into ranges (first, after the last); in a range, tensors are the rows of one, in order."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for place in range(1, len(replies) + 1):
        base = replies[first][0]._base
        if place < len(replies) and base is not None and replies[place][0]._base is base:
            continue
        is_stack = all(map(are_rows_in_order, zip(*replies[first:place])))
        ranges += [(first, place)] if is_stack else [(single, single + 1) for single in range(first, place)]
        first = place
    return ranges


def are_rows_in_order(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie one directly behind the other in the memory of one tensor."""
    start, nbytes, last = tensors[0].data_ptr(), tensors[0].nbytes, tensors[-1]
    if nbytes == 0 or tensors[0]._base is not last._base:
        return False
    places = list(range(start, start + len(tensors) * nbytes, nbytes))
    return [t.data_ptr() for t in tensors] == places and all([t.is_contiguous() for t in tensors])
