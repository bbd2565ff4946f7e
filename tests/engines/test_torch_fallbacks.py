"""Private interfaces of torch that a later release may lack: training is slower without them, and learns the same."""

import builtins
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.model import foreach, tree
from shoal.core.model.made_bytes import count_made_bytes
from shoal.core.model.torch_fallback import log_fallback
from shoal.core.task import Engine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.graph import UntracedStep
from shoal.engines.serial import SerialEngine
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result, play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close, drop_wall_seconds

SMALL: dict[str, Any] = dict(devices=5, sample=5, rounds=2, precision="float64", split="dirichlet:0.3")


@pytest.fixture(autouse=True)
def said_again():
    """Every test hears what is said once in a process."""
    log_fallback.cache_clear()
    yield
    log_fallback.cache_clear()


def run_with(engine: Engine, **recipe: Any) -> Result:
    return play_runs([prepare_new_run(Recipe().with_values(**SMALL | recipe))], engine)[0]


def hide_interface(patch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Let `from module import name` fail in shoal; torch itself goes on with it."""
    honest = builtins.__import__

    def import_others(target, globals=None, locals=None, fromlist=(), level=0):
        if target == module and name in (fromlist or ()) and (globals or {}).get("__name__", "").startswith("shoal."):
            raise ImportError(f"cannot import name {name!r} from {module!r}")
        return honest(target, globals, locals, fromlist, level)

    patch.setattr(builtins, "__import__", import_others)


def runs_in_python(engine: BatchedEngine) -> bool:
    return all(program.call == program.module.forward for program in engine.programs.values())


INTERFACES = {
    ("torch.fx.experimental.proxy_tensor", "make_fx"): lambda engine: all(
        isinstance(program.module, UntracedStep) for program in engine.programs.values()
    ),
    ("torch._guards", "tracing"): lambda engine: not runs_in_python(engine),
    ("torch.jit._fuser", "optimized_execution"): runs_in_python,
    ("torch.utils._python_dispatch", "TorchDispatchMode"): lambda engine: not runs_in_python(engine),
}
"""Each interface, and what is seen of its absence in an engine afterwards."""


@pytest.mark.parametrize("module, name", INTERFACES, ids=lambda part: part.rpartition(".")[2])
@pytest.mark.parametrize("model", ["mlp", pytest.param("lenet", marks=pytest.mark.whole)])
def test_without_an_interface_training_gives_the_same(module, name, model, monkeypatch, caplog):
    wanted = run_with(SerialEngine(), method="scaffold", model=model)
    engine = BatchedEngine(3)
    monkeypatch.setattr(engine, "close", lambda: None)  # the programs are looked at
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="shoal"):
        hide_interface(patch, module, name)
        found = run_with(engine, method="scaffold", model=model)
    assert engine.programs and INTERFACES[module, name](engine)
    assert_trees_close(found.params, wanted.params, 1e-9, f"without {name} something else is learnt")
    rows = [[drop_wall_seconds(row) for row in result.history.rows] for result in (found, wanted)]
    assert [row["macs_work"] for row in rows[0]] == [row["macs_work"] for row in rows[1]]
    lines = [line for line in map(logging.LogRecord.getMessage, caplog.records) if "does not offer" in line]
    assert len(lines) == 1 and lines[0].endswith("which is slower."), lines


class BranchingModel(nn.Module):
    """A model that decides on its numbers, so that no step of it can be vectorised."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x if x.sum() > 0 else -x)


def test_a_step_that_cannot_be_vectorised_is_noticed_without_a_trace(monkeypatch, caplog):
    torch.manual_seed(0)
    model = BranchingModel()
    wanted = shoal.run("fedavg", model=model, engine="serial", **SMALL)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="shoal"):
        hide_interface(patch, "torch.fx.experimental.proxy_tensor", "make_fx")
        found = shoal.run("fedavg", model=model, engine="batched", width=3, **SMALL)
    assert tree.is_same_tree(found.params, wanted.params) and "one after the other" in caplog.text


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: foreach.subtract_each(a, b),
        lambda a, b: foreach.add_to_each(a, b, 0.3) or a,
        lambda a, b: foreach.copy_into_each(a, b) or a,
        lambda a, b: foreach.compute_max_norms(b),
    ],
    ids=["sub", "add", "copy", "norm"],
)
def test_lists_of_tensors_one_by_one(call: Callable[..., Any], monkeypatch, caplog):
    def make_lists() -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        return [[torch.randn(3, 4), torch.randn(7)] for _ in range(2)]

    wanted = call(*make_lists())
    for name in ("sub", "add_", "copy_", "norm"):
        monkeypatch.delattr(torch, f"_foreach_{name}")
    with caplog.at_level(logging.WARNING, logger="shoal"):
        for _ in range(2):
            assert tree.is_same_tree(list(call(*make_lists())), list(wanted))
    assert len(caplog.records) == 1 and "one by one" in caplog.text


def test_bytes_are_counted_with_what_the_work_returns():
    assert count_made_bytes(lambda: float((torch.ones(10) * 2).sum())) == (20.0, 4 * (10 + 10 + 1))
