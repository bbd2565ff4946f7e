"""Runs of one model whose modules hold other numbers beside their parameters do not train with each other's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.model.module_constants import digest_constants
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.runs.session import play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close

MODEL = """
import torch
from torch import nn

class RandomFeatures(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, classes)
        self.register_buffer("buffer", torch.randn(6), persistent=False)
        self.tensor, self.several, self.number = torch.randn(6), [torch.randn(6)], float(torch.rand(()))

    def forward(self, x):
        return self.last(self.first(x) * self.{read})
"""


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("read", ["buffer", "tensor", "several[0]", "number"])
def test_every_seed_keeps_what_its_module_drew(read: str, width: int, tmp_path: Path):
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("{read}", read))
    x, y = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4
    values: dict[str, Any] = dict(data=(x, y, x[:20], y[:20]), model=f"{file}:RandomFeatures", devices=4, sample=3)
    values |= dict(rounds=2, batch=5, lr=0.1, epochs=2, precision="float64")
    recipes = [Recipe().with_values(**hand_over_objects(values) | dict(seed=seed)) for seed in (1, 2)]
    shared_data: dict = {}
    found = play_runs([prepare_new_run(r, dataset_cache=shared_data) for r in recipes], BatchedEngine(width))
    for recipe, one in zip(recipes, found):
        alone = play_runs([prepare_new_run(recipe)], SerialEngine())[0]
        assert_trees_close(one.params, alone.params, 1e-9, "weights")


def test_constants_are_settings_and_what_is_in_no_state_dict():
    def make(seed: int, dropout: float = 0.0, is_persistent: bool = True) -> str:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.TransformerEncoderLayer(4, 2, dropout=dropout))
        module.register_buffer("more", torch.randn(3), is_persistent)
        return digest_constants(module)

    assert make(0) == make(1)
    assert make(0) != make(0, dropout=0.5)
    assert make(0, is_persistent=False) != make(1, is_persistent=False)
