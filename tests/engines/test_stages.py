"""Stages: stacks become narrower when many devices are done, and train to the same numbers."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal import Part
from shoal.core.ledger import Row
from shoal.core.server_state import ServerState
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.stages import Stage, plan_stages
from shoal.engines.batched.step_draws import StepDraws
from shoal.engines.serial import SerialEngine
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import assert_trees_close, play_rounds

UNEVEN: dict[str, Any] = {
    "devices": 12,
    "sample": 9,
    "split": "dirichlet:0.1",
    "batch": 8,
    "precision": "float64",
    "momentum": 0.9,
    "lr": 0.01,
    "clip": 1.0,
}


DROPPING = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


def plan(steps: list[int], width: int, widest: int, granularity: int = 1, macs: float = 0) -> list[Stage]:
    """The stages of devices with these steps, whose forward pass takes one multiply-accumulate for each sample."""
    stack = SimpleNamespace(
        slots=[SimpleNamespace(steps=n) for n in steps],
        step_inputs=SimpleNamespace(steps=max(steps)),
        batch=1,
        setup=SimpleNamespace(net=SimpleNamespace(macs_forward=1)),
        width=width,
    )
    return plan_stages(cast(Any, stack), widest, granularity, macs)


def test_stages_by_hand():
    assert plan([40, 30, 5, 5, 4, 3, 2, 1], 8, 8) == [Stage(0, 4, 8, 8), Stage(4, 5, 4, 4), Stage(5, 40, 2, 2)]
    assert plan([40, 30, 5, 5, 4, 3, 2, 1], 8, 8, 25) == [Stage(0, 25, 8, 8), Stage(25, 40, 2, 2)]
    assert plan([40, 30, 5, 5, 4, 3, 2, 1], 8, 8, macs=8) == [Stage(0, 4, 8, 8), Stage(4, 40, 4, 4)]
    assert plan([40, 30, 5, 5, 4, 3, 2, 1], 8, 8, macs=9) == [Stage(0, 40, 8, 8)]
    assert plan([9, 9, 9, 9], 4, 4) == [Stage(0, 9, 4, 4)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(0, 30), st.integers(1, 30))
def test_every_device_gets_all_of_its_steps(steps, idle, granularity):
    steps, width = sorted(steps, reverse=True), len(steps) + idle
    stages = plan(steps, width, width, granularity)
    assert stages[0].first == 0 and stages[-1].last == steps[0]
    assert [stage.first for stage in stages[1:]] == [stage.last for stage in stages[:-1]]
    for stage in stages:
        assert stage.first < stage.last and stage.count <= stage.width <= width
        assert all(count <= stage.first for count in steps[stage.count :])


@pytest.mark.parametrize(
    "method, more",
    [
        ("fedavg", {"model": "lenet", "augment": "crop:2,flip", "steps": "size:6", "sample": 6}),
        ("fedprox+mixup", {"steps": "size:5"}),
        ("scaffold", {"accumulate": 2, "steps": "size:5"}),
        ("fedavg", {"model": DROPPING, "steps": "size:5"}),
    ],
    ids=["images", "draws of a part", "memory", "dropout"],
)
def test_narrower_stacks_train_to_the_same_numbers(method, more, monkeypatch):
    widths: set[int] = set()
    get_program = BatchedEngine.get_program

    def note_width(self, sharing_key, stack, *rest):
        widths.add(stack.width)
        return get_program(self, sharing_key, stack, *rest)

    monkeypatch.setattr(BatchedEngine, "get_program", note_width)
    (alone, rows), (stacked, other_rows) = play_on_both(UNEVEN | more, method)
    assert_trees_close([alone.params, alone.states], [stacked.params, stacked.states], 1e-9, "narrower stacks differ")
    assert [row["train_loss"] for row in rows] == pytest.approx([row["train_loss"] for row in other_rows], abs=1e-9)
    assert len(widths) >= 3


def play_on_both(recipe: dict[str, Any], method: Any, width: int = 9) -> list[tuple[ServerState, list[Row]]]:
    """Two rounds one device after the other, and two in stacks that become narrower as soon as they can."""
    found = []
    for engine in (SerialEngine(), BatchedEngine(width, narrowing_macs=0)):
        values = shoal.hand_over_objects({**recipe, "method": method})
        assembly = assemble_run(Recipe().with_values(**values))
        assembly.loop.host.engine = engine
        found.append(play_rounds(assembly.loop, assembly.loop.start(assembly.net), 0, 2))
    return found


@dataclass(frozen=True)
class Delays(Part):
    """Takes the update of two steps ago: a step carries on as one tensor what it was given as another."""

    def begin(self, params, memory, device):
        zeros = {k: torch.zeros_like(params[k]) for k in device.net.trainable}
        return params, {"last": zeros, "before": zeros}

    def step(self, update, state, scored, local):
        return state["before"], {"last": update, "before": state["last"]}


@dataclass(frozen=True)
class NotesSteps(Part):
    """Doubles the first update: what a step carries on is one number for all devices."""

    def begin(self, params, memory, device):
        return params, {"begun": torch.zeros((), dtype=torch.float64)}

    def step(self, update, state, scored, local):
        return {k: (2 - state["begun"]) * u for k, u in update.items()}, {"begun": torch.ones((), dtype=torch.float64)}


@pytest.mark.parametrize("part", [Delays(), NotesSteps()], ids=str)
def test_what_steps_without_padding_carry_on_may_lie_in_one_place(part):
    recipe = {"devices": 8, "sample": 8, "batch": 4, "steps": "7,7,6,6,5,5,5,5", "precision": "float64", "lr": 0.05}
    (alone, _), (stacked, _) = play_on_both(recipe, [part], width=8)
    assert_trees_close(alone.params, stacked.params, 1e-9, "narrower stacks differ")


def test_draws_of_several_steps_take_up_no_more_than_they_may(monkeypatch):
    made: list[tuple[int, int]] = []
    stack_steps = StepDraws.stack_steps

    def note_bytes(self, first, last):
        drawn = stack_steps(self, first, last)
        made.append((last - first, sum(t.nbytes for t in drawn)))
        return drawn

    monkeypatch.setattr(StepDraws, "stack_steps", note_bytes)
    monkeypatch.setattr("shoal.engines.batched.inputs.MOST_DRAWN_BYTES", 10_000)
    recipe = UNEVEN | {"model": DROPPING, "steps": "size:5"}
    (alone, _), (stacked, _) = play_on_both(recipe, "fedprox+mixup")
    assert 1 < max(steps for steps, _ in made) and max(made_bytes for _, made_bytes in made) <= 10_000
    assert_trees_close(alone.params, stacked.params, 1e-9, "draws of few steps differ")
