"""Folders that earlier versions wrote are gone on with, and give what they would have given then."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import InProcessTransport, history_rows, make_clients, make_recipe, play_with_devices
from golden.make import WHOLE, numbers
from safetensors.torch import load_file

import shoal
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import read_recipe_file

VERSIONS = sorted(p for p in (Path(__file__).parents[1] / "golden").iterdir() if (p / "expected.json").is_file())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def golden(request, tmp_path) -> Path:
    """A copy of what a version wrote, to write into."""
    return Path(shutil.copytree(request.param, tmp_path / "golden"))


def expected_of(golden: Path) -> Any:
    return json.loads((golden / "expected.json").read_text())


def assert_same(found: Any, expected: Any) -> None:
    """Equal but for the last digits of what was computed, which another processor may have otherwise."""
    if isinstance(expected, dict):
        told = {key for key in found if "." in key}  # by parts, which were silent in earlier versions
        assert found.keys() - told == expected.keys() - told
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4)
    else:
        assert found == expected


def test_a_run_goes_on(golden):
    result = shoal.resume(golden / "run", rounds=WHOLE)
    assert_same(numbers(result), expected_of(golden)["run"])
    for name, value in load_file(golden / "run.safetensors").items():
        torch.testing.assert_close(result.params[name], value, rtol=1e-4, atol=1e-6)


def test_a_comparison_goes_on(golden):
    both = shoal.resume(golden / "comparison", rounds=WHOLE)
    found = {method: [numbers(result) for result in own] for method, own in both.results.items()}
    assert_same(found, expected_of(golden)["comparison"])


def test_devices_go_on_with_what_they_remember(golden, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    for device in range(3):
        shutil.copytree(golden / f"device-{device}", there / f"home-{device}")
    asked = make_recipe("scaffold", golden / "server", rounds=WHOLE)
    (golden / "server/recipe.toml").write_text(asked.to_toml())
    assert_same(
        history_rows(play_with_devices(asked, InProcessTransport(make_clients(there)))), expected_of(golden)["server"]
    )


def test_a_recipe_means_what_it_meant(golden):
    found = Recipe().with_values(**read_recipe_file(golden / "recipe.toml"))
    assert found.fingerprint() == expected_of(golden)["fingerprint"]
