"""Buffers that a forward pass changes: in their place or by another tensor, it is the same, on every engine."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close

SMALL: dict[str, Any] = dict(
    devices=4, sample=3, rounds=2, batch=5, lr=0.1, epochs=2, split="dirichlet:0.3", precision="float64"
)


class AverageNorm(nn.Module):
    """Divides by a running average of the norm of a weight, and counts its steps."""

    norm: Tensor
    steps: Tensor

    def __init__(self, in_place: bool, is_persistent: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.in_place = nn.Linear(8, 6), nn.Linear(6, 4), in_place
        self.register_buffer("norm", torch.ones(()), is_persistent)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), is_persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.in_place:
            self.norm.mul_(0.9).add_(self.first.weight.detach().norm(), alpha=0.1)
            self.steps.add_(1)
        elif self.training:
            self.norm = self.norm * 0.9 + self.first.weight.norm() * 0.1
            self.norm = self.norm.detach()
            self.steps = self.steps + 1
        return self.last((self.first(x) / self.norm).relu())


def run_with(engine: Any, module: nn.Module) -> Result:
    x, y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4
    values = hand_over_objects(SMALL | dict(model=module, data=(x, y, x[:20], y[:20])))
    return play_runs([prepare_new_run(Recipe().with_values(**values))], engine)[0]


@pytest.mark.parametrize(
    "make_engine",
    [SerialEngine, lambda: BatchedEngine(1), lambda: BatchedEngine(3)],
    ids=["serial", "one", "batched"],
)
def test_a_buffer_that_is_assigned_changes_like_one_that_is_written_to(make_engine):
    written = run_with(SerialEngine(), AverageNorm(in_place=True))
    engine = make_engine()
    assigned = run_with(engine, AverageNorm(in_place=False))
    assert written.params["norm"] > 1 and written.params["steps"] > 0
    assert_trees_close(assigned.params, written.params, 1e-9, "weights and buffers")
    assert not getattr(engine, "unvectorisable", None)


def test_a_forward_that_writes_to_what_is_in_no_state_dict_is_refused():
    with pytest.raises(shoal.ShoalError, match="writes to the buffer norm, which is in no state_dict.*persistent=True"):
        run_with(SerialEngine(), AverageNorm(in_place=True, is_persistent=False))
