"""Weighted sums over replies that lie in memory as an engine left them: the same numbers, whatever is stacked."""

import pytest
import torch

from shoal.core.stacked_sums import add_weighted, group_stacked

SHAPES = ((3, 4), (5,))
WEIGHTS = [0.1, 0.2, 0.3, 0.15, 0.25]


def make_rows(count: int, seed: int = 0) -> list[list[torch.Tensor]]:
    """Replies as the rows of stacked tensors."""
    generator = torch.Generator().manual_seed(seed)
    stacks = [torch.randn(count, *shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [list(row) for row in zip(*(stack.unbind() for stack in stacks))]


def copy_rows(replies: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in reply] for reply in replies]


def add_up(replies: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    add_weighted(sums, replies, WEIGHTS[: len(replies)])
    return sums


def swap_two(replies):
    return [replies[1], replies[0], *replies[2:]]


def swap_second_tensors(replies):
    return [[replies[0][0], replies[1][1]], [replies[1][0], replies[0][1]], *replies[2:]]


def leave_one_out(replies):
    return [*replies[:2], *replies[3:]]


def replace_one_tensor(replies):
    return [*replies[:2], [replies[2][0] * 2, replies[2][1]], *replies[3:]]


def take_a_transposed_row(replies):
    square = torch.randn(5, 4, 4, dtype=torch.float64).unbind()
    return [[square[i].T[:3] if i == 1 else square[i][:3], reply[1]] for i, reply in enumerate(replies)]


CASES = [list, swap_two, swap_second_tensors, leave_one_out, replace_one_tensor, take_a_transposed_row]


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_sums_are_those_of_replies_one_by_one(change):
    replies = change(make_rows(5))
    for actual, expected in zip(add_up(replies), add_up(copy_rows(replies)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def test_rows_without_a_gap_are_one_product_and_all_else_is_added_one_by_one():
    rows = make_rows(5)
    assert group_stacked(rows) == [[0, 1, 2, 3, 4]]
    assert group_stacked(swap_two(rows)) == [[1, 0, 2, 3, 4]]
    assert group_stacked(leave_one_out(rows)) == [[0, 1], [2, 3]]
    assert group_stacked(copy_rows(rows)) == [[0], [1], [2], [3], [4]]
    assert group_stacked(swap_second_tensors(rows)) == [[0], [1], [2], [3], [4]]
    assert group_stacked(make_rows(2, 1) + make_rows(3, 2)) == [[0, 1], [2, 3, 4]]
    first, second = make_rows(3, 1), make_rows(2, 2)
    assert group_stacked([first[0], second[0], first[1], second[1], first[2]]) == [[0, 2, 4], [1, 3]]
    assert group_stacked([]) == []


def test_a_row_that_is_left_out_may_hold_anything():
    replies = make_rows(5)
    replies[2][0].fill_(float("nan"))
    assert all(total.isfinite().all() for total in add_up(leave_one_out(replies)))
