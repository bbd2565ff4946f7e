"""Frozen tensors on engines: the same numbers on all, and one copy for all devices of a stack."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from frozen_models import Backboned, TiedWords, draw_words
from torch import nn

import shoal
from shoal.core.model import tree
from shoal.core.server_state import ServerState
from shoal.core.session import Session
from shoal.core.task import Engine, Task
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.hyperparams import build_program_key
from shoal.engines.batched.memory import estimate_device_bytes
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import PoolEngine
from shoal.runs.build import Assembly, assemble_run
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import assert_trees_close, play_rounds

SMALL: dict[str, Any] = {"devices": 6, "sample": 4, "precision": "float64", "split": "dirichlet:0.3", "batch": 6}
MODELS = {
    "frozen": (lambda: Backboned(), {}),
    "tied": (lambda: TiedWords(), {"data": draw_words(), "split": "iid", "steps": "3"}),
    "tied and frozen": (lambda: TiedWords(frozen=True), {"data": draw_words(), "split": "iid", "steps": "3"}),
}
ENGINES = {
    "batched": lambda: BatchedEngine(4),
    "batched alone": lambda: BatchedEngine(1),
    "batched in parts": lambda: BatchedEngine(3),
    "pool": lambda: PoolEngine(2, 2, lambda: BatchedEngine(2)),
}


def assemble(model: nn.Module, **recipe: Any) -> Assembly:
    return assemble_run(Recipe().with_values(**shoal.hand_over_objects(SMALL | {"model": model} | recipe)))


def play(engine: Engine, model: nn.Module, rounds: int = 2, **recipe: Any) -> tuple[ServerState, list[dict]]:
    assembly = assemble(model, **recipe)
    loop = assembly.loop
    loop.host.engine = engine
    try:
        server_state, rows = play_rounds(loop, loop.start(assembly.net), 0, rounds)
    finally:
        engine.close()
    return server_state, rows


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_engines_agree(model, engine):
    make, recipe = MODELS[model]
    torch.manual_seed(0)
    module = make()
    expected, rows = play(SerialEngine(), module, **recipe)
    found, same_rows = play(ENGINES[engine](), module, **recipe)
    assert_trees_close(found.params, expected.params, 1e-9, "another engine trains to something else")
    for key in ("bytes_up", "bytes_down", "macs_work"):
        assert [row[key] for row in rows] == [row[key] for row in same_rows]
    assert not tree.is_same_tree(expected.params, expected.net.initial)


def test_frozen_tensors_are_inputs_of_a_program_and_one_copy_for_all_devices():
    engine, assembly = BatchedEngine(4), assemble(Backboned())
    assembly.loop.host.engine = engine
    play_rounds(assembly.loop, assembly.loop.start(assembly.net), 0, 1)
    frozen = {tuple(value.shape) for value in assembly.net.frozen.values()}
    assert engine.programs and (256, 64) not in frozen and (64, 256) in frozen
    for program in engine.programs.values():
        module: Any = program.module
        nodes = list(module.graph.nodes)
        assert not [node for node in nodes if node.op == "get_attr"]
        given = [tuple(node.meta["val"].shape) for node in nodes if node.op == "placeholder"]
        assert given.count((64, 256)) == 1 and not [shape for shape in given if shape[1:] == (64, 256)]
        assert program.call != program.module.forward, "it is no TorchScript"


def test_the_memory_of_a_device_is_that_of_its_head():
    bytes_by_backbone = {}
    for frozen in (True, False):
        task = make_tasks(assemble(Backboned(width=4096, frozen=frozen), split="iid"))[0]
        bytes_by_backbone[frozen] = estimate_device_bytes(DeviceSlot(task), [], True)
    backbone = 256 * 4096 * 8
    assert bytes_by_backbone[True] < backbone < bytes_by_backbone[False] / 3


def make_tasks(assembly: Assembly) -> list[Task]:
    session = Session(assembly.loop, assembly.net, assembly.loop.start(assembly.net))
    session.open_round()
    return session.make_tasks()


def test_a_budget_counts_frozen_tensors_once():
    assembly = assemble(Backboned(width=1024), split="iid")
    task = make_tasks(assembly)[0]
    frozen, own = tree.count_tree_bytes(assembly.net.frozen), estimate_device_bytes(DeviceSlot(task), [], True)
    engine = BatchedEngine(50, budget=frozen + 7 * own)
    assert own < frozen and engine.compute_stack_limit((), DeviceSlot(task), []) == 7


def test_setups_with_other_backbones_share_no_program():
    setups = [assemble(Backboned(seed=seed)).loop.host.setup for seed in (0, 0, 1)]
    first, same, other = (build_program_key(replace(setup, kind="same"), []) for setup in setups)
    assert first == same != other
