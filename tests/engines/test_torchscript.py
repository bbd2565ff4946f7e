"""Traced programs as TorchScript: those of parts in which a plain number meets one number per device, too."""

import pytest
import torch
from open_engine import OpenEngine

from shoal.engines.serial import SerialEngine
from shoal.runs.recipe import Recipe
from shoal.runs.session import play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close


@pytest.mark.parametrize("method", ["fedprox(mu=0.1)", "moon", "fedsam(rho=0.01)", "feddecorr"])
def test_programs_of_several_devices_are_torchscript(method):
    recipe = Recipe().with_values(
        method=method, devices=4, sample=4, rounds=2, precision="float64", split="dirichlet:0.5", batch=8
    )
    engine = OpenEngine(2)
    batched = play_runs([prepare_new_run(recipe)], engine)[0]
    assert engine.programs
    assert all(isinstance(program.call, torch.jit.ScriptFunction) for program in engine.programs.values())
    serial = play_runs([prepare_new_run(recipe)], SerialEngine())[0]
    assert_trees_close(batched.params, serial.params, 1e-9, method)
