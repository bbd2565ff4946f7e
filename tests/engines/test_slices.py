"""Plans that are levels: a simulation trains the cut-out model, and nothing else can tell the difference."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from shoal.core.compose import Method
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.core.task import Engine
from shoal.core.types import Round
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.parts.feddyn import FedDyn
from shoal.parts.fedprox import FedProx
from shoal.parts.scaffold import Scaffold
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.laws import check_part
from shoal.testing.rounds import assert_trees_close, play_rounds


@dataclass(frozen=True)
class TwoUnits(Part):
    """plan: two of the three units, others in every round."""

    sets: ClassVar = frozenset({"plan"})

    level: bool = True

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        def kept(device: int) -> dict[str, torch.Tensor]:
            return {"a": torch.tensor([u for u in range(3) if u != (device + round.number) % 3])}

        return {d: replace(p, kept=kept(d), level=self.level) for d, p in plans.items()}, state


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_part_of_levels_keeps_the_laws(whole):
    check_part(TwoUnits(), whole)


@pytest.mark.parametrize("engine", [SerialEngine, lambda: BatchedEngine(3)], ids=["serial", "batched"])
@pytest.mark.parametrize("beside", [FedProx(1.0), Scaffold(), FedDyn(0.1)], ids=str)
def test_the_cut_out_model_trains_to_what_the_masked_one_trains_to(beside: Part, engine):
    ends = []
    for level in (True, False):
        own: Engine = engine()
        loop, net = build_tiny_run(Method((TwoUnits(level), beside)), (5, 3, 4), momentum=0.5, engine=own)
        server_state, rows = play_rounds(loop, loop.start(net), 0, 4)
        local_devices = loop.host
        assert len(local_devices.slices.sliced_setups) == (3 if level else 0)
        memories = [local_devices.memory.get(d) for d in range(3)]
        ends.append(([server_state.params, server_state.states, memories], rows))
    assert_trees_close(ends[0][0], ends[1][0], 1e-9, "the cut-out model goes elsewhere")
    for key in ("bytes_up", "bytes_down", "macs_forward"):
        assert [row[key] for row in ends[0][1]] == [row[key] for row in ends[1][1]]


def test_what_a_cut_out_model_computes_is_counted_to_the_last_product():
    """4-2-2 instead of 4-3-2: 2 x 4 + 2 x 2 = 12 products forward; backward as many again, and no input gradient."""
    loop, net = build_tiny_run(Method((TwoUnits(),)), (2,))
    _, rows = play_rounds(loop, loop.start(net), 0, 1)
    assert rows[0]["macs_forward"] == 12
    assert rows[0]["macs_work"] == 2 * (12 + 12 + 4)
