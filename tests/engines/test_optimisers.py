"""Every optimiser trains alike on every engine, beside other runs, and over a stop in the middle."""

import os
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.model import tree
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import PoolEngine
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import play_rounds

SMALL: dict[str, Any] = {"devices": 5, "sample": 5, "rounds": 2, "precision": "float64", "lr": 0.01, "epochs": "1-3"}
SETTINGS: list[dict[str, Any]] = [
    {"momentum": 0.9, "nesterov": True, "clip": 0.5},
    {"optimiser": "adam", "weight_decay": 0.1},
    {"optimiser": "adamw", "weight_decay": 0.1, "clip": 0.5},
    {"local_lr_schedule": "cosine", "local_lr_warmup": 2, "method": "scaffold"},
    {"local_lr_schedule": "step:2:0.5", "lr_schedule": "linear:5"},
    {"accumulate": 3, "method": "fedprox"},
    {"lr_groups": "fc2.*=0.1,*.bias=3", "momentum": 0.5, "method": "feddyn"},
    {"lr_groups": "fc1.weight=0", "optimiser": "adam", "method": "fjord"},
    {"optimiser": "adamw", "local_lr_schedule": "linear:20:0.1", "accumulate": 2, "method": "fjord"},
]


def uneven() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Devices with 1, 3, 8, 17 and 30 samples."""
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 3, 8, 17, 30)
    return [(torch.randn(n, 5, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def end_of(engine: Any, **setting: Any) -> Any:
    given = shoal.hand_over_objects({"data": uneven()})
    recipe = Recipe().with_values(**SMALL | given | {"split": "owner", "batch": 8} | setting)
    assembly = assemble_run(recipe)
    assembly.loop.host.engine = engine
    state, rows = play_rounds(assembly.loop, assembly.loop.start(assembly.net), 0, 2)
    return [state.params, state.states], [row["train_loss"] for row in rows]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_optimiser_trains_alike_on_every_engine(setting):
    expected, losses = end_of(SerialEngine(), **setting)
    batched = BatchedEngine(4)
    pool = [PoolEngine(2, 4, lambda: batched)] if hasattr(os, "fork") else []
    for engine in (batched, *pool):
        found, other = end_of(engine, **setting)
        if engine is not batched:
            engine.close()
        pairs = zip(tree.collect_tensors(found), tree.collect_tensors(expected), strict=True)
        assert max(float((a - b).abs().max()) for a, b in pairs if a.numel()) <= 1e-9
        assert other == pytest.approx(losses, abs=1e-9)


def test_micro_batches_with_dropout_train_alike():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    given = shoal.hand_over_objects({"model": module})
    expected, _ = end_of(SerialEngine(), **given, accumulate=3)
    whole, _ = end_of(SerialEngine(), **given)
    found, _ = end_of(BatchedEngine(5), **given, accumulate=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("setting", [{"optimiser": "adamw", "weight_decay": 0.1}, {"local_lr_schedule": "cosine"}])
@pytest.mark.parametrize("width", [1, 5])
def test_steps_of_every_optimiser_run_as_torchscript(setting, width):
    """Without Python between the operations of a step."""
    engine = BatchedEngine(width)
    end_of(engine, local_lr_warmup=2, **setting)
    assert engine.programs
    for program in engine.programs.values():
        assert program.call != program.module.forward


def test_runs_that_differ_in_numbers_of_adamw_train_side_by_side():
    setting = dict(SMALL, split="dirichlet:0.5", optimiser="adamw")
    vary = ["beta2=0.9,0.999", "weight_decay=0,0.1"]
    both = shoal.compare(["fedavg"], vary=vary, engine="batched", **setting)
    apart = shoal.compare(["fedavg"], vary=vary, engine="serial", **setting)
    losses = [[r.history.rows[-1]["train_loss"] for own in c.results.values() for r in own] for c in (both, apart)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9) and len({round(loss, 9) for loss in losses[0]}) == 4


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_run_with_adamw_goes_on_where_it_stopped(tmp_path, engine):
    setting = dict(
        SMALL, engine=engine, optimiser="adamw", weight_decay=0.1, lr_schedule="cosine:4", precision="float32"
    )
    straight = shoal.run(**dict(setting, rounds=4))
    shoal.run(**dict(setting, out=str(tmp_path / "run")))
    resumed = shoal.resume(tmp_path / "run", rounds=4)
    assert straight.history.equals_except_wall_time(resumed.history)
    assert tree.is_same_tree(straight.params, resumed.params)
