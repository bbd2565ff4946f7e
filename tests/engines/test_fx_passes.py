"""Passes over traced steps: fewer operations, the same numbers, whoever else reads what they overwrite."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.graph import trace_step
from shoal.engines.serial import SerialEngine
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close

SMALL: dict[str, Any] = dict(
    devices=4, sample=4, rounds=2, batch=5, lr=0.1, epochs=2, split="dirichlet:0.3", precision="float64"
)


def run_with(engine: Any, **given: Any) -> Result:
    return play_runs([prepare_new_run(Recipe().with_values(**hand_over_objects(SMALL | given)))], engine)[0]


class Factors(nn.Module):
    """A weight that is the product of two: the gradient of each factor is a product with the other."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(6, 2) / 3), nn.Parameter(torch.randn(2, 8) / 3)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.left @ self.right).relu())


class Marked(nn.Module):
    """Tokens of which some are missing, marked by the very number by which torch marks targets that do not count."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(7, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embedding(torch.where(x != -100, x, 0)).mean(1))


def make_inputs(module: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(module, Factors):
        return torch.randn(60, 8, generator=generator)
    return torch.randint(1, 7, (60, 5), generator=generator).index_fill(1, torch.tensor([2]), -100)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("made", [Factors, Marked])
def test_programs_have_the_numbers_of_the_step_as_it_is_written(made, width):
    torch.manual_seed(0)
    module, targets = made(), torch.arange(60) % 4
    x = make_inputs(module)
    given = dict(model=module, data=(x, targets, x[:20], targets[:20]))
    expected = run_with(SerialEngine(), **given)
    assert_trees_close(run_with(BatchedEngine(width), **given).params, expected.params, 1e-9, "weights")


@pytest.mark.parametrize("read", [lambda w: w.t(), lambda w: w.view(-1), lambda w: w.detach()])
def test_a_weight_of_which_a_view_is_carried_on_is_not_overwritten(read):
    """A part may keep the weights as they were before the step, in another shape."""

    def step(carried, fixed, frame):
        before, loss = read(carried[0]), carried[0].sum()
        return [torch.addcmul(carried[0], frame[0], fixed[0], value=-1), before], loss

    given = [torch.ones(2, 3), read(torch.zeros(2, 3))], [torch.tensor(0.5)], [torch.ones(2, 3)]
    (weight, before), _ = trace_step(step, *given, in_place=True)(*given[0], *given[1], *given[2])
    assert weight.eq(0.5).all() and before.eq(1).all()


def test_an_update_that_turns_the_weight_around_is_read_before_it_is_overwritten():
    def step(carried, fixed, frame):
        return [torch.addcmul(carried[0], carried[0].t(), fixed[0], value=-1)], carried[0].sum()

    weight, half = torch.arange(9.0).view(3, 3), torch.tensor(0.5)
    expected = weight - weight.t() / 2
    (found,), _ = trace_step(step, [weight], [half], [], in_place=True)(weight, half)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bias", [torch.ones(1, 3, 3), torch.ones(1, 3, 3, dtype=torch.int64), torch.ones(3).double()])
def test_a_bias_of_another_type_is_added_to_its_product(bias):
    def step(carried, fixed, frame):
        return [carried[0] + torch.bmm(frame[0], frame[0])], carried[0].sum()

    matrices = torch.arange(9.0, dtype=torch.float64).view(1, 3, 3)
    (found,), _ = trace_step(step, [bias], [], [matrices], in_place=True)(bias, matrices)
    assert torch.equal(found, bias + matrices @ matrices)


def test_a_product_with_1_that_makes_another_form_is_kept():
    def step(carried, fixed, frame):
        wide = torch.ops.aten.mul.Scalar(carried[0].expand(3, 3), 1)
        return [wide.view(-1), torch.ops.aten.mul.Scalar(frame[0], 1.0)], carried[0].sum()

    given = [torch.arange(3.0), torch.zeros(2)], [], [torch.arange(2)]
    (wide, real), _ = trace_step(step, *given, in_place=True)(*given[0], *given[2])
    assert torch.equal(wide, torch.arange(3.0).repeat(3)) and real.dtype == torch.float32
