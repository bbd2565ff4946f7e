"""Modules that no trace can stand for, or that see what pads a batch, train as on `serial`, and one line says so."""

import logging
from typing import Any

import pytest
import torch
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.trace_checks import draws_random_numbers
from shoal.engines.serial import SerialEngine
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close, drop_wall_seconds

SMALL: dict[str, Any] = dict(
    devices=5, sample=4, rounds=2, batch=5, lr=0.1, epochs=2, split="dirichlet:0.3", precision="float64"
)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.first(x)))

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class DropoutByFunction(Layers):
    def change(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.4, self.training)


class Noise(Layers):
    def change(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class MeanOfSome(Layers):
    """How many numbers are above 0 is another question in every batch."""

    def change(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()


class PastTorch(Layers):
    """Reads numbers where no trace sees it."""

    def change(self, x: Tensor) -> Tensor:
        return x * float(x.detach().numpy().max())


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x > 0).sum(1).clamp(max=7).detach()
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], lengths, batch_first=True, enforce_sorted=False)
        return self.last(self.lstm(packed)[1][0][0])


class BatchMean(Layers):
    def change(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class BatchSize(Layers):
    def change(self, x: Tensor) -> Tensor:
        return x * len(x)


class RunningMean(Layers):
    mean: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def change(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x.relu()


class InstanceStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv1d(1, 3, 3), nn.Linear(18, 4)
        self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x[:, None])).flatten(1))


class Plain(Layers):
    def change(self, x: Tensor) -> Tensor:
        return x.relu()


class AttentionOfOne(Layers):
    """Fused attention, whose operation could draw random numbers, and does not without dropout."""

    def change(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 3, 2)
        return F.scaled_dot_product_attention(x, x, x).flatten(1)


def run_with(engine: Any, module: nn.Module, **more: Any) -> Result:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 8, generator=generator), torch.arange(60) % 4
    values = hand_over_objects(SMALL | dict(model=module, data=(x, y, x[:20], y[:20])) | more)
    return play_runs([prepare_new_run(Recipe().with_values(**values))], engine)[0]


def find_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "vectorised" in r.getMessage()]


UNREPEATABLE = [DropoutByFunction, Noise, MeanOfSome, PastTorch, Packed]
MIXING = [BatchMean, BatchSize, RunningMean, InstanceStatistics]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("made", [*UNREPEATABLE, *MIXING])
def test_what_a_trace_cannot_stand_for_is_trained_as_it_is_written(made, width, caplog):
    torch.manual_seed(0)
    module = made()
    expected = run_with(SerialEngine(), module)
    caplog.clear()
    found = run_with(BatchedEngine(width), module)
    assert_trees_close(found.params, expected.params, 1e-9, "weights")
    assert [drop_wall_seconds(row) for row in found.history.rows] == [
        drop_wall_seconds(row) for row in expected.history.rows
    ]
    assert len(find_warnings(caplog)) == 1 and "one after the other" in find_warnings(caplog)[0]


@pytest.mark.parametrize("made", [Plain, AttentionOfOne])
def test_other_modules_are_traced(made, caplog):
    torch.manual_seed(0)
    module, engine = made(), BatchedEngine(1)
    expected = run_with(SerialEngine(), module)
    assert_trees_close(run_with(engine, module).params, expected.params, 1e-9, "weights")
    assert not find_warnings(caplog) and not engine.unvectorisable


def test_a_model_that_mixes_its_batch_says_nothing_of_hyperparameters(caplog):
    """Runs with several values share a program, and it is not these that keep a step from being vectorised."""
    torch.manual_seed(0)
    module, generator = BatchMean(), torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 8, generator=generator), torch.arange(60) % 4
    values = hand_over_objects(SMALL | dict(model=module, data=(x, y, x[:20], y[:20])))
    recipes = [Recipe().with_values(**values | dict(method=f"fedprox(mu={mu})")) for mu in (0.1, 0.2)]
    found = play_runs([prepare_new_run(recipe) for recipe in recipes], BatchedEngine(4))
    expected = [play_runs([prepare_new_run(recipe)], SerialEngine())[0] for recipe in recipes]
    for one, other in zip(found, expected):
        assert_trees_close(one.params, other.params, 1e-9, "weights")
    assert "decides on the value" not in caplog.text


def test_only_dropout_above_0_is_random():
    def trace(p: float) -> list[bool]:
        make = torch.fx.experimental.proxy_tensor.make_fx(
            lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)
        )
        return [draws_random_numbers(node) for node in make(torch.randn(1, 1, 2, 2)).graph.nodes]

    assert any(trace(0.5)) and not any(trace(0.0))
