"""A user's own part is tried on the run's own model and samples, and what it returns is looked at in every round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ShoalError
from shoal.models import build_model
from shoal.plugins.load import PROBED_PARTS
from shoal.plugins.smoke_run import build_tiny_run, make_smoke_setup

SMALL: dict[str, Any] = {"devices": 4, "sample": 3, "rounds": 3, "steps": "2", "batch": 4, "model": "lenet"}
HEAD = """
from dataclasses import dataclass, replace
import torch
from shoal import Part

@dataclass(frozen=True)
class Mine(Part):
    '''Mine.'''
    mu: float = 1.0

"""


def written(folder: Path, body: str) -> list[str]:
    path = folder / "mine.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    return [str(path)]


RIGHT = {
    "stamps-a-corner": """
def objective(self, inner, local):
    def score(params, batch):
        corner = torch.zeros_like(batch.inputs)
        corner[:, :, -2:, -2:] = 1
        return inner(params, batch._replace(inputs=torch.where(corner > 0, corner, batch.inputs)))
    return score""",
    "turns-labels-around": """
def objective(self, inner, local):
    def score(params, batch):
        return inner(params, batch._replace(targets=tuple((9 - y, w) for y, w in batch.targets)))
    return score""",
    "knows-a-layer-by-name": """
def step(self, update, state, scored, local):
    return update | {"fc3.bias": update["fc3.bias"] * 0}, state""",
    "knows-ten-classes": """
def measure(self, params, state, device):
    labels = device.samples.take_all().targets[0][0]
    return {"seen": torch.zeros(10, dtype=torch.int32).index_fill(0, labels, 1)}

def serve(self, params, state, round):
    assert torch.stack([r.report["mine"]["seen"] for r in round.replies]).sum(0).shape == (10,)
    return params, state""",
}


@pytest.mark.parametrize("right", RIGHT)
def test_a_part_that_fits_the_runs_own_shapes_and_classes_is_accepted(tmp_path, right, caplog):
    result = shoal.run("mine", parts=written(tmp_path, RIGHT[right]), engine="batched", **SMALL)
    assert len(result.history) == 3 and not caplog.records
    assert not any("dropped" in row for row in result.history.rows)


MISSPELT = {
    "server": ("def server(self, params, state, round):\n    return params, state", "`serve`"),
    "objectiv": ("def objectiv(self, inner, local):\n    return inner", "`objective`"),
    "replace_loss": ("replace_loss = True", "`replaces_loss`"),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_name_that_is_almost_that_of_a_point_is_told(tmp_path, name, caplog):
    body, right = MISSPELT[name]
    shoal.run("mine", parts=written(tmp_path, body), **SMALL)
    assert f"The part mine defines `{name}`" in caplog.text and right in caplog.text


def test_what_the_runs_own_model_cannot_take_is_told_before_the_first_round(tmp_path):
    body = "def serve(self, params, state, round):\n    return {k: v.flatten(2) for k, v in params.items()}, state"
    with pytest.raises(ShoalError, match="mine breaks a rule at serve") as error:
        shoal.run("mine", parts=written(tmp_path, body), out=str(tmp_path / "run"), **SMALL)
    assert error.value.kind.name == "bad-part" and not (tmp_path / "run").exists()


LATER = "round.number == 2"
WRONG = {
    "combine": (
        f"new = {{k: round.replies[0].delta[k] + v for k, v in round.anchor.items()}}\n"
        f"    return {{k: v.flatten() if {LATER} and v.dim() == 4 else v for k, v in new.items()}}, state",
        r"returns \(150,\) for conv1.weight, which has shape \(6, 1, 5, 5\)",
    ),
    "serve": (f"return {{k: v.double() if {LATER} else v for k, v in given.items()}}, state", "float64 on cpu for"),
    "weigh": (f"return (given[1:] if {LATER} else given), state", "shape"),
    "prune": (f"return (replace(given, kept={{'nothing': torch.arange(2)}}) if {LATER} else given), state", "no axis"),
    "evaluate": (f"return {{'': {{}}}} if {LATER} else given", "nothing"),
}


@pytest.mark.parametrize("point", WRONG)
def test_what_a_part_returns_is_looked_at_in_every_round_on_the_runs_own_model(tmp_path, point):
    """Wrong in the third round, which no look beforehand meets."""
    body, word = WRONG[point]
    path = written(tmp_path, f"def {point}(self, given, state, round):\n    {body}")
    with pytest.raises(ShoalError, match=f"mine breaks a rule at {point}.*{word}") as error:
        shoal.run("mine", parts=path, engine="serial", **SMALL)
    assert error.value.kind.name == "bad-part"


class Forks(nn.Module):
    """A model that looks at its inputs, so that it cannot be vectorised."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.flatten(1)) if float(x.sum()) > 0 else self.fc(-x.flatten(1))


def test_a_part_is_not_blamed_for_a_model_that_cannot_be_vectorised(tmp_path):
    body = "def step(self, update, state, scored, local):\n    return update, state"
    given = SMALL | {"model": Forks(), "engine": "serial"}
    assert len(shoal.run("mine", parts=written(tmp_path, body), **given).history) == 3


def test_a_look_at_a_large_model_is_a_short_one():
    net = build_model("resnet18", (3, 32, 32), 10, 0)
    setting = make_smoke_setup(net, torch.zeros(100, 3, 32, 32), torch.arange(100) % 10)
    assert setting.sizes == (2, 2) and len(setting.targets) == 8
    few = make_smoke_setup(build_model("lenet", (1, 8, 8), 10, 0), torch.zeros(3, 1, 8, 8), torch.arange(3))
    assert few.sizes == (5, 3) and len(few.targets) == 12, "also where the data set has fewer samples than that"


def test_the_runs_own_model_is_left_as_it_was():
    net = build_model("lenet", (1, 8, 8), 10, 0)
    setting = make_smoke_setup(net, torch.zeros(20, 1, 8, 8), torch.arange(20) % 10)
    from shoal.core.compose import Method

    assert build_tiny_run(Method(), setting.sizes, setting=setting)[1].module is not net.module


def test_a_part_is_looked_at_once_for_each_kind_of_run(tmp_path):
    path = written(tmp_path, RIGHT["turns-labels-around"])
    before = len(PROBED_PARTS)
    shoal.compare(["mine(mu=0.5)"], seeds=3, parts=path, engine="serial", **SMALL)
    assert len(PROBED_PARTS) == before + 1
