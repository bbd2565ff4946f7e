"""Sharpness-aware parts: numbers worked out by hand, and what they must leave as it was.

The set-up is one weight that starts from 0, two steps of rate 0.1, and devices whose gradients are w + 1 (`LOW`) and
w - 3 (`HIGH`).
"""

from dataclasses import replace

import pytest
import torch
from one_weight import one_weight
from tiny_parts import KeepMask
from torch import nn

import shoal
from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.local.step import advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.types import Local, Optimiser
from shoal.parts.fedcm import FedCM
from shoal.parts.fedda import FedDA
from shoal.parts.feddyn import FedDyn
from shoal.parts.fedlesam import FedLESAM
from shoal.parts.fedsam import FedSAM
from shoal.parts.fedsmoo import FedSMOO
from shoal.parts.fedspeed import FedSpeed
from shoal.parts.heterofl import HeteroFL
from shoal.parts.lib.ascent import make_ascent_step
from shoal.parts.scaffold import Scaffold
from shoal.plugins.smoke_run import build_tiny_run, prepare_local_trainings
from shoal.testing.rounds import play_rounds
from shoal.testing.toy import toy

LOW, HIGH = ([[1]], [-1.0]), ([[3]], [1.0])
"""Targets and inputs of one device: its loss is half the square of w + 1, or of w - 3."""
BOTH = ([[1], [3]], [-1.0, 1.0])


def two_steps(parts: list[Part], device: tuple, rounds: int = 1, optimiser: Optimiser | None = None) -> list[float]:
    """The weight that is broadcast after each round of two local steps."""
    targets, inputs = device
    given = optimiser or Optimiser()
    return one_weight(parts, targets, rounds=rounds, steps=lambda _: 2, x=inputs, optimiser=given)[0]


def test_a_step_uphill_has_one_norm_over_all_tensors():
    step = make_ascent_step({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}, 0.1)
    torch.testing.assert_close(step, {"a": torch.tensor([0.06]), "b": torch.tensor([[0.08]])})
    assert make_ascent_step({"a": torch.zeros(2)}, 0.1)["a"].tolist() == [0.0, 0.0]


def test_fedsam_takes_the_gradient_uphill():
    # gradients 1 and 0.89 at w, 1.1 and 0.99 uphill; on the other side -3 and -2.69, -3.1 and -2.79
    assert two_steps([FedSAM()], LOW) == pytest.approx([-0.209])
    assert two_steps([FedSAM()], HIGH) == pytest.approx([0.589])
    assert two_steps([FedSAM()], BOTH) == pytest.approx([0.19])


def test_fedasam_goes_uphill_relative_to_the_weight():
    # T = 0 + 0.2, so e = 0.1 * 0.2 and the step goes along 1.02; then T = 0.102 + 0.2 and along 0.898 + 0.0302
    assert two_steps([FedSAM(adaptive=True)], LOW) == pytest.approx([-(0.102 + 0.09282)])


def test_weight_decay_is_no_part_of_either_gradient():
    # the second step goes along (0.31 - 3 - 0.1) + 1 * 0.31
    assert two_steps([FedSAM()], HIGH, optimiser=Optimiser(weight_decay=1.0)) == pytest.approx([0.31 + 0.248])


def build_net_with_batch_norm() -> Net:
    torch.manual_seed(0)
    return Net(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)).double(), (4,), 2)


def test_statistics_of_batch_norm_are_those_of_the_pass_at_w():
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(8, 4, generator=generator).double(), torch.tensor([0, 1] * 4)
    plain, sharp = (
        toy(p, sizes=(2, 2), net=build_net_with_batch_norm(), inputs=inputs, targets=targets) for p in ((), FedSAM())
    )
    plain.play()
    sharp.play()
    for name in plain.net.buffers:
        assert torch.equal(plain.params[name], sharp.params[name]), name
    assert not torch.equal(plain.params["3.weight"], sharp.params["3.weight"])


def test_what_a_mask_keeps_from_training_is_not_shifted_either():
    loop, net = build_tiny_run(compose([FedSAM(), KeepMask()]))
    training, seen = prepare_local_trainings(loop, loop.start(net))[0], []

    def watch(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
        seen.append(params)
        return compute_autograd_gradient(scorer, params, batch)

    batch = training.device.samples.take_batch(training.rows[0])
    advance(loop.host.setup.rule, training.state, batch, training.context_at_step(0, {}), watch)
    here, uphill = seen
    assert torch.equal(here["a.weight"], uphill["a.weight"])
    shift = torch.cat([(uphill[k] - here[k]).flatten() for k in here])
    assert float(shift.norm()) == pytest.approx(0.1, rel=1e-5), "the way uphill is measured over what is trained"


def test_fedlesam_goes_back_to_the_model_that_was_received_last_time():
    # round 1 is FedAvg: 0.19; round 2 from there with e = -0.1: along 1.09 and 0.981, and along -2.91 and -2.619
    assert two_steps([FedLESAM()], BOTH, rounds=2) == pytest.approx([0.19, 0.19 + (-0.2071 + 0.5529) / 2])


def test_fedspeed_adds_the_mean_of_all_devices():
    # 0.89 and 0.7921 from 1, so h = -0.2079; on the other side h = 0.5859; the mean 0.189 is added to the mean
    assert two_steps([FedSpeed()], BOTH, rounds=2) == pytest.approx([0.378, 0.794972], rel=1e-5)


def test_fedspeed_with_one_device_of_two():
    absent = ([[1], [3]], [-1.0, float("inf")])
    assert two_steps([FedSpeed()], absent) == pytest.approx([-0.2079 - 0.2079 / 2])
    assert two_steps([FedSpeed(over="round")], absent) == pytest.approx([-0.2079 - 0.2079])


def test_fedspeed_as_the_paper_writes_it():
    # g = 1: half of 1 and half of 1 + 0.5; from -0.125, g = 0.875 gives 1.09375, and lam pulls by 0.1 * -0.125
    part = FedSpeed(alpha=0.5, rho=0.5, normalised=False)
    expected = -0.125 - 0.1 * (0.875 * 1.25 - 0.0125)
    assert two_steps([replace(part, over="round")], LOW) == pytest.approx([2 * expected])


@pytest.mark.parametrize("part", [FedSpeed(rho=0.0), FedSMOO(rho=0.0)], ids=str)
def test_without_steps_uphill_it_is_feddyn_on_equal_devices(part):
    assert two_steps([part], BOTH, rounds=4) == pytest.approx(two_steps([FedDyn(alpha=0.1)], BOTH, rounds=4), rel=1e-12)


@pytest.mark.parametrize("part", [FedSpeed(), FedSMOO()], ids=str)
def test_h_is_always_the_mean_of_what_devices_remember(part):
    sizes = (7, 1, 4, 2, 5)
    loop, net = build_tiny_run(Method((part,)), sizes)
    server, _ = play_rounds(replace(loop, sample=2), loop.start(net), 0, 6)
    h = server.states[part.name()]["h"]
    known = [loop.host.memory.get(d).get(part.name(), {}).get("h") or tree.make_zeros(h) for d in range(len(sizes))]
    mean = {k: torch.stack([own[k] for own in known]).mean(0) for k in h}
    assert all(v.any() for v in h.values())
    torch.testing.assert_close(h, mean, rtol=1e-12, atol=1e-12)


def test_fedsmoo_begins_as_fedspeed_and_where_devices_disagree_s_is_0():
    # mu = 0.2 and -0.2 after two steps
    sent, _, rows = one_weight([FedSMOO()], BOTH[0], steps=lambda _: 2, x=BOTH[1])
    assert sent == pytest.approx([0.378])
    assert rows[0]["fedsmoo.s_norm"] == 0.0
    # 0.2 over the last gradients 0.89 and -2.69
    assert rows[0]["fedsmoo.mu_ratio"] == pytest.approx((0.2 / 0.89 + 0.2 / 2.69) / 2, rel=1e-5)
    assert rows[0]["bytes_by"]["down"]["fedsmoo"] == rows[0]["bytes_by"]["up"]["fedsmoo"] == 2 * 8


def test_fedsmoo_s_is_as_long_as_a_step_uphill_or_0():
    # mu = 0.6 after round 1; in round 2 d = g - 0.6 - 0.3 is below 0, so mu loses 0.3 + 0.3 and is 0 again
    _, _, rows = one_weight([FedSMOO(rho=0.3)], LOW[0], rounds=3, steps=lambda _: 2, x=LOW[1])
    assert [row["fedsmoo.s_norm"] for row in rows] == pytest.approx([0.3, 0.0, 0.3])


@pytest.mark.parametrize(
    "optimum, weights, sums", [(0.0, [0.89, 0.7921], [0.0, 0.0]), (4.0, [1.31, 1.5859], [-0.2, -0.4])]
)
def test_fedsmoo_agrees_on_a_way_uphill(optimum: float, weights: list[float], sums: list[float]):
    """With s = 0.1 from the server: d = 0.9 and 0.79, or -3.1 and -2.59."""
    part, net = FedSMOO(), build_tiny_run(Method())[1]
    anchor, s = {"w": torch.tensor([1.0]).double()}, {"w": torch.tensor([0.1]).double()}
    empty = torch.zeros(0)

    def compute_slope(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
        return {"w": params["w"] - optimum}, scorer(params, batch)

    def score_nothing(params: Params, batch: Batch) -> BatchScore:
        return BatchScore(empty, empty, empty, {}, {}, {})

    params, zero = anchor, tree.make_zeros(anchor)
    state = {"h": zero, "mu": zero, "g_norm": torch.tensor(0.0)}
    for weight, total in zip(weights, sums):
        local = Local(net, anchor, {"s": s}, {}, {}, state)
        update, scored = part.gradient(compute_slope, local)(score_nothing, params, Batch(empty, ()))
        update, state = part.step(update, state, scored, local)
        params = {"w": params["w"] - 0.1 * update["w"]}
        assert float(params["w"]) == pytest.approx(weight)
        assert float(state["mu"]["w"]) == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("part", [FedCM(), FedSpeed(), FedSMOO()], ids=str)
def test_local_momentum_is_refused(part):
    with pytest.raises(ShoalError, match=f"{part.name()} cannot be used with local momentum 0.9"):
        two_steps([part], LOW, optimiser=Optimiser(momentum=0.9))


@pytest.mark.parametrize(
    "a, b",
    [
        (FedSAM(), FedLESAM()),
        (FedSAM(), FedSpeed()),
        (FedSpeed(), FedSMOO()),
        (FedSpeed(), FedDyn()),
        (FedSMOO(), Scaffold()),
        (FedSpeed(), Scaffold()),
        (FedCM(), Scaffold()),
        (FedCM(), FedDA()),
        (FedLESAM(), HeteroFL()),
        (FedSMOO(), HeteroFL()),
    ],
    ids=str,
)
def test_what_would_correct_twice_or_needs_the_whole_model_is_refused(a, b):
    with pytest.raises(ShoalError, match=f"{a.name()} and {b.name()} cannot be used together"):
        compose([a, b])


def test_fedlesam_goes_with_feddyn_and_scaffold():
    for other in (FedDyn(), Scaffold()):
        row = toy([FedLESAM(), other]).play(2)[1]
        assert not row.get("dropped") and not row.get("void")


def test_values_side_by_side_give_what_they_give_alone(caplog):
    methods = ["fedsam(rho=0.0)", "fedsam(rho=0.5)", "fedspeed(lam=0.1)", "fedspeed(lam=1.0, alpha=0.5)"]
    setting = {"devices": 4, "sample": 3, "rounds": 2, "batch": 32, "lr": 0.1}
    ends = []
    for engine in ("serial", "batched"):
        both = shoal.compare(methods, engine=engine, **setting)
        ends.append([run.history.rows[-1]["loss"] for group in both.results.values() for run in group])
    assert len(set(ends[0])) == 4 and ends[1] == pytest.approx(ends[0], rel=1e-5)
    assert "cannot be vectorised" not in caplog.text and "calls of their own" not in caplog.text
