"""Weighted sums over replies; those that lie one behind the other in memory, as an engine left them, in one product."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.model.foreach import add_to_each


def add_weighted(sums: Sequence[Tensor], replies: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> None:
    """Add weight * tensor of each reply to the sums, in place; a reply has one contiguous tensor for each sum."""
    for group in group_stacked(replies):
        if len(group) == 1 or not all(total.is_contiguous() for total in sums):
            for place in group:
                add_to_each(sums, replies[place], weights[place])
            continue
        group_weights = [weights[place] for place in group]
        for total, top_row in zip(sums, replies[group[0]]):
            factors = torch.tensor(group_weights, dtype=total.dtype, device=total.device)
            rows = top_row.as_strided((len(group), top_row.numel()), (top_row.numel(), 1))
            total.view(-1).addmv_(rows.T, factors)


def group_stacked(replies: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """The numbers of the replies in groups; in a group, tensors are the rows of one, in order, without a gap."""
    by_stack: dict[int, list[int]] = {}
    for number, reply in enumerate(replies):
        base = reply[0]._base
        by_stack.setdefault(id(reply[0] if base is None else base), []).append(number)
    groups: list[list[int]] = []
    for numbers in by_stack.values():
        numbers.sort(key=lambda number: replies[number][0].data_ptr())
        is_next = [are_rows_in_order([replies[n][0] for n in pair]) for pair in zip(numbers, numbers[1:])]
        ends = [place + 1 for place, follows in enumerate(is_next) if not follows]
        for first, last in zip([0, *ends], [*ends, len(numbers)]):
            run = numbers[first:last]
            is_stack = all(map(are_rows_in_order, zip(*(replies[number] for number in run))))
            groups += [run] if is_stack else [[number] for number in run]
    return groups


def are_rows_in_order(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors lie one directly behind the other in the memory of one tensor."""
    start, nbytes, last = tensors[0].data_ptr(), tensors[0].nbytes, tensors[-1]
    if nbytes == 0 or tensors[0]._base is not last._base:
        return False
    places = list(range(start, start + len(tensors) * nbytes, nbytes))
    return [t.data_ptr() for t in tensors] == places and all([t.is_contiguous() for t in tensors])
