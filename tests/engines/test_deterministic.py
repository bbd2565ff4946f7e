"""`deterministic`: it holds for the length of a run, and what torch cannot do so is told in a sentence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.backends import cudnn

import shoal
from shoal.engines.deterministic import deterministic_algorithms, explain_nondeterminism
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice, choose_engine
from shoal.runs.recipe import Recipe

TINY: dict[str, Any] = {"devices": 4, "sample": 2, "rounds": 1, "steps": "1", "split": "iid"}
TWO: dict[str, Any] = TINY | {"deterministic": True, "threads": 2}
"""On a processor operations can differ from one time to the next only where there are several threads."""
UNPOOLING = """
import torch.nn.functional as F
from torch import nn

class Unpooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        small, places = F.max_pool2d(x, 2, return_indices=True)
        return self.fc(F.max_unpool2d(small, places, 2).flatten(1))
"""
PUTTING = """
from dataclasses import dataclass
import torch
import shoal

@dataclass(frozen=True)
class Putting(shoal.Part):
    def weigh(self, weights, state, round):
        return weights.clone().put_(torch.tensor([0]), torch.ones(1, dtype=weights.dtype)), state
"""


def read_flags() -> tuple:
    torch_flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *torch_flags, cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore


def test_the_flags_hold_inside_and_are_as_before_afterwards():
    before = read_flags()
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        assert read_flags() == (True, False, True, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        raise ZeroDivisionError
    assert read_flags() == before
    with deterministic_algorithms(False):
        assert read_flags() == before


@pytest.mark.parametrize("threads, wanted", [(2, True), (1, False)])
def test_a_run_computes_so_where_it_makes_a_difference(threads, wanted):
    before, seen = read_flags(), []
    shoal.run(engine="serial", watch=lambda *_: seen.append(read_flags()[0]), **TWO | {"threads": threads})
    assert seen == [wanted] and read_flags() == before


def test_it_is_part_of_the_pick_and_of_the_fingerprint(tmp_path):
    assert choose_engine(assemble_run(Recipe().with_values(engine="serial", **TWO))) == EngineChoice(
        "serial", threads=2, deterministic=True
    )
    assert str(EngineChoice("serial", threads=2, deterministic=True)) == "serial, 2 threads, deterministic"
    shoal.run(engine="serial", out=str(tmp_path / "run"), **TWO)
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["deterministic"] is True
    seen = []
    shoal.resume(tmp_path / "run", rounds=2, watch=lambda *_: seen.append(read_flags()[0]))
    assert seen == [True]
    assert (
        Recipe(deterministic=True).fingerprint() != Recipe().fingerprint() == Recipe(deterministic=False).fingerprint()
    )


def test_on_one_thread_of_a_processor_it_changes_nothing():
    plain, deterministic = (shoal.run(engine="serial", **TINY, deterministic=wanted) for wanted in (False, True))
    assert plain.history.equals_except_wall_time(deterministic.history)
    assert all(torch.equal(value, deterministic.params[name]) for name, value in plain.params.items())


def write_file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_operation_without_such_a_form_is_named(tmp_path, engine):
    model = write_file(tmp_path / "unpooling.py", UNPOOLING + "\nmodel = Unpooling()\n") + ":model"
    shoal.run(model=model, engine=engine, **TINY)
    with pytest.raises(shoal.ShoalError, match="no deterministic form of max_unpooling2d_forward_out") as error:
        shoal.run(model=model, engine=engine, **TWO)
    assert error.value.kind.name == "bad-value" and "\n" not in str(error.value) and "--compute cpu" in str(error.value)


def test_an_operation_of_a_part_is_named_and_the_part_is_not_blamed(tmp_path):
    part = write_file(tmp_path / "putting.py", PUTTING)
    with pytest.raises(shoal.ShoalError, match="deterministic is true, and torch has no deterministic form of put_\\."):
        shoal.run("putting", parts=[part], engine="serial", **TWO)


def test_a_process_that_has_multiplied_before_is_told_what_to_do():
    text = "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ..., but this "
    text += "operation is not deterministic because it uses CuBLAS and ... CUBLAS_WORKSPACE_CONFIG=:4096:8 or ..."
    fault = explain_nondeterminism(RuntimeError(text))
    assert fault and "Start a new process" in fault.advice and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in fault.advice
    assert explain_nondeterminism(RuntimeError("something else")) is explain_nondeterminism(ValueError("put_")) is None
