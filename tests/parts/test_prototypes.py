"""FedNH: hand-worked prototypes, what travels, and that units left out count as 0."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corners import corners
from tiny_parts import CutOnce, HalfWidth, ServerJoins
from torch import Tensor, nn

import shoal
from shoal.core.batch import Batch, Samples
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.local.step import StepRule
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Axis, Cut, Plan
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.server_state import EnrolmentRegister
from shoal.core.streams import RandomStreams
from shoal.core.types import Device, Local, Optimiser, Outcome, Reply, Round
from shoal.engines.batched.engine import BatchedEngine
from shoal.models.lenet import lenet
from shoal.parts.feddrop import FedDrop
from shoal.parts.fednh import FedNH
from shoal.parts.fedprox import FedProx
from shoal.parts.fjord import FjORD
from shoal.plugins.smoke_run import build_tiny_net, build_tiny_run, make_step_contexts, prepare_local_trainings
from shoal.testing.hosts import RecordingHost
from shoal.testing.laws import check_pair
from shoal.testing.rounds import play_rounds

WEIGHT, READ, SCALE = "b.prototypes.weight", "b.read", "b.scale"


@pytest.mark.parametrize("other", [FjORD(), FedProx(), FedDrop(), HalfWidth(), ServerJoins(), CutOnce()], ids=str)
def test_pairs(other: Part):
    check_pair(FedNH(), other)
    check_pair(other, FedNH())


def net_of(width: int, classes: int, activation: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> Net:
    """Features that are the inputs, or a function of them, if `a` is the identity."""
    torch.manual_seed(0)
    layers = OrderedDict(a=nn.Linear(width, width), act=activation or nn.Identity(), b=nn.Linear(width, classes))
    axis = Axis("a", width, (Cut("a.weight", 0), Cut("a.bias", 0), Cut("b.weight", 1, reads=True)))
    return Net(nn.Sequential(layers).to(dtype), (width,), classes, (axis,))


def device_of(net: Net, inputs: Tensor, targets: Tensor, plan: Plan = WHOLE_MODEL) -> Device:
    samples = Samples(inputs, targets, torch.arange(len(inputs)))
    return Device(0, 0, samples, net, {}, net.initial, {}, {}, plan, RandomStreams(0), "fednh")


def told_by(
    net: Net, inputs: Tensor, targets: Tensor, plan: Plan = WHOLE_MODEL, changed: Params | None = None
) -> Params:
    params = net.initial | {"a.weight": torch.eye(2).double(), "a.bias": torch.zeros(2).double()} | (changed or {})
    return FedNH().measure(params, {}, device_of(net, inputs, targets, plan))


# prototypes ----------------------------------------------------------------------------------------------------------


def test_prototypes_start_at_right_angles_and_follow_from_the_layer_they_replace():
    first = FedNH().model(build_tiny_net()).initial[WEIGHT]
    torch.testing.assert_close(first @ first.T, torch.eye(2).double())
    assert torch.equal(first, FedNH().model(build_tiny_net()).initial[WEIGHT])
    other = FedNH().model(net_of(3, 2)).initial[WEIGHT]
    assert not torch.allclose(other, first)
    assert torch.equal(FedNH().model(net_of(3, 2, dtype=torch.float32)).initial[WEIGHT], other.float())


def test_more_classes_than_features_have_prototypes_of_length_1_too():
    many = FedNH().model(net_of(2, 9)).initial[WEIGHT]
    torch.testing.assert_close(many.norm(dim=1), torch.ones(9).double())
    assert (many @ many.T - torch.eye(9)).max() < 1 - 1e-6


def test_making_the_model_leaves_the_global_generator_alone():
    net, state = build_tiny_net(), torch.get_rng_state()
    FedNH().model(net)
    assert torch.equal(state, torch.get_rng_state())


def test_logits_are_the_scaled_cosines():
    net = FedNH(scale=3.0).model(net_of(2, 3))
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]]).double()
    params = net.initial | {"a.weight": torch.eye(2).double(), "a.bias": torch.zeros(2).double()}
    logits, features, _, _ = net.forward(params, x)
    torch.testing.assert_close(features, torch.tensor([[1.8, 2.4], [0.0, 0.0]]).double())
    torch.testing.assert_close(logits[0], 3 * params[WEIGHT] @ torch.tensor([0.6, 0.8]).double())
    assert not logits[1].any()


# what devices tell ---------------------------------------------------------------------------------------------------


def test_a_device_tells_the_mean_direction_of_each_class_that_it_holds():
    """(0.6, 0.8) and (0.8, -0.6) of class 0 have the mean (0.7, 0.1); class 1 is missing."""
    net = FedNH().model(net_of(2, 3))
    x, y = torch.tensor([[3.0, 4.0], [8.0, -6.0], [0.0, 5.0]]).double(), torch.tensor([0, 0, 2])
    told = told_by(net, x, y)
    assert told["counts"].tolist() == [2, 0, 1] and told["counts"].dtype == torch.int32
    expected = torch.tensor([[0.7 / 0.5**0.5, 0.1 / 0.5**0.5], [0.0, 1.0]]).double()
    torch.testing.assert_close(told["means"], expected)
    turned = told_by(net, x, y, changed={SCALE: torch.tensor(-2.0).double()})
    torch.testing.assert_close(turned["means"], expected)


def test_features_that_are_0_have_no_direction():
    told = told_by(FedNH().model(net_of(2, 2)), torch.zeros(1, 2).double(), torch.tensor([1]))
    assert told["counts"].tolist() == [0, 1] and told["means"].tolist() == [[0.0, 0.0]]


def test_a_slice_tells_only_of_its_own_features():
    net = FedNH().model(net_of(2, 2))
    plan = Plan({"a": torch.tensor([1])})
    sent = net.slicer.place(net.slicer.take(net.initial, plan), net.initial, plan)
    x = torch.tensor([[3.0, 4.0], [8.0, -6.0]]).double()
    told = told_by(net, x, torch.tensor([0, 1]), plan, {WEIGHT: sent[WEIGHT]})
    assert told["means"].tolist() == [[1.0], [-1.0]]


def test_words_are_classes_at_every_position():
    torch.manual_seed(0)
    module = nn.Sequential(OrderedDict(embed=nn.Embedding(5, 3), fc=nn.Linear(3, 5))).double()
    net = FedNH().model(Net(module, (4,), 5, token_inputs=True))
    x, y = torch.tensor([[0, 1, 2, 3], [3, 3, 1, 0]]), torch.tensor([[1, 2, 3, 3], [3, 1, 0, 0]])
    told = FedNH().measure(net.initial, {}, device_of(net, x, y))
    assert told["counts"].tolist() == [2, 2, 1, 3, 0]
    directions = F.normalize(net.initial["embed.weight"], dim=1)
    torch.testing.assert_close(told["means"][1], F.normalize(directions[0] + directions[3], dim=0))


# what the server makes of it -----------------------------------------------------------------------------------------


def a_round(told: list[tuple[list[int], list[list[float]]]], weights: list[float]) -> Round:
    """Replies with these counts and means, of the tiny net's 2 classes and 3 features."""
    loop, net = build_tiny_run(Method((FedNH(),)), (2,) * len(told))
    round = loop.make_round(loop.start(net), 0, EnrolmentRegister({}, loop.host.enrol))
    replies = [
        Reply(d, 2, {}, {}, {"fednh": {"counts": torch.tensor(n).int(), "means": torch.tensor(z).double()}}, Outcome(d))
        for d, (n, z) in enumerate(told)
    ]
    plans = {d: WHOLE_MODEL for d in range(len(told))}
    return replace(round, replies=replies, plans=plans, weights=torch.tensor(weights).double())


def served(rho: float, round: Round) -> list[list[float]]:
    """From the prototypes (1, 0, 0) and (0, 1, 0)."""
    params = round.anchor | {WEIGHT: torch.eye(2, 3).double()}
    new, _ = FedNH(rho).serve(params, {}, round)
    assert params[WEIGHT].tolist() == [[1, 0, 0], [0, 1, 0]]
    return new[WEIGHT].tolist()


def test_prototypes_move_towards_the_means_weighted_by_samples():
    """Class 0: 3 (0, 1, 0) + 1 (1, 0, 0) has the direction (1, 3, 0) / 10^0.5. Class 1: (0, 0, 1), from one device."""
    told = [([3, 1], [[0.0, 1, 0], [0, 0, 1]]), ([1, 0], [[1.0, 0, 0]]), ([9, 9], [[0.0, 0, 1], [1, 0, 0]])]
    found = served(0.5, a_round(told, [0.5, 0.5, 0.0]))
    first = np.array([0.5 + 0.5 / 10**0.5, 1.5 / 10**0.5, 0])
    np.testing.assert_allclose(found, [first / np.linalg.norm(first), [0, 0.5**0.5, 0.5**0.5]], atol=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_class_that_nobody_holds_keeps_its_prototype(rho: float):
    found = served(rho, a_round([([2, 0], [[0.0, 1, 0]])], [1.0]))
    assert found[1] == [0.0, 1.0, 0.0]
    expected = np.array([rho, 1 - rho, 0]) / np.hypot(rho, 1 - rho)
    np.testing.assert_allclose(found[0], expected, atol=1e-12)


def test_opposites_leave_a_prototype_where_it_was():
    assert served(0.5, a_round([([1, 0], [[-1.0, 0, 0]])], [1.0])) == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_every_reply_counts_the_same():
    round = a_round([([1, 1], [[1.0, 0, 0], [0, 1, 0]])] * 3, [1.0] * 3)
    weights, _ = FedNH().weigh(torch.tensor([5.0, 1.0, 0.0]), {}, round)
    assert weights.tolist() == [1.0, 1.0, 0.0]


# rounds --------------------------------------------------------------------------------------------------------------


def test_prototypes_are_sent_and_never_come_back():
    loop, net = build_tiny_run(Method((FedNH(),)), (5, 3, 1), momentum=0.5, engine=BatchedEngine(3))
    spy = RecordingHost(loop.host)
    standing = loop.start(net)
    for number in range(3):
        before = standing.params
        standing, _ = play_rounds(replace(loop, host=spy), standing, number, number + 1)
        for job, outcome in zip(spy.jobs[-1], spy.outcomes[-1]):
            assert torch.equal(job.message.body[WEIGHT]["value"], before[WEIGHT])
            assert outcome.message and list(outcome.message.body) == ["a.weight", "a.bias", SCALE]
        torch.testing.assert_close(standing.params[WEIGHT].norm(dim=1), torch.ones(2).double())
        assert not torch.allclose(standing.params[WEIGHT], before[WEIGHT])
    assert float(standing.params[SCALE]) != 1.0 and (standing.params[READ] == 1).all()


def test_bytes_are_those_of_the_classes_that_a_device_holds():
    """The tiny run has numbers of 8 bytes, 3 features and 2 classes; its device of one sample holds one class."""
    loop, net = build_tiny_run(Method((FedNH(),)), (5, 1))
    spy = RecordingHost(loop.host)
    play_rounds(replace(loop, host=spy), loop.start(net), 0, 1)
    up = [o.message.bytes_by["fednh"] for o in spy.outcomes[0] if o.message]
    assert up == [4 * 2 + 8 * 3 * 2, 4 * 2 + 8 * 3]
    model = [o.message.bytes_by["model"] for o in spy.outcomes[0] if o.message]
    assert model == [8 * (12 + 3 + 1)] * 2 and spy.jobs[0][0].message.nbytes == 8 * (12 + 3 + 1 + 6)


def test_after_pruning_prototypes_have_length_1_again():
    loop, net = build_tiny_run(Method((FedNH(), CutOnce())))
    pruned, _ = play_rounds(loop, loop.start(net), 0, 1)
    assert pruned.params[WEIGHT].shape == (2, 2) and (pruned.params[WEIGHT].norm(dim=1) < 1).any()
    later, _ = play_rounds(loop, pruned, 1, 2)
    torch.testing.assert_close(later.params[WEIGHT].norm(dim=1), torch.ones(2).double())


# units that are left out ---------------------------------------------------------------------------------------------


def test_a_masked_model_is_the_cut_out_one_whatever_lies_before_the_features():
    net = FedNH().model(net_of(4, 3, nn.Sigmoid()))
    plan, x = Plan({"a": torch.tensor([0, 3])}), torch.randn(5, 4).double()
    small = net.slicer.take(net.initial, plan)
    masked = net.slicer.place(small, net.initial, plan) | {READ: net.initial[READ]}
    torch.testing.assert_close(net.forward(masked, x)[0], net.cut(plan).forward(small, x)[0])


def test_lenet_is_cut_with_its_prototypes():
    net = FedNH().model(lenet((3, 32, 32), 10))
    plan = Plan({a.name: torch.arange(0, a.size, 2) for a in net.axes})
    assert net.cut(plan).initial["fc3.prototypes.weight"].shape == (10, 42)


def test_a_narrow_step_of_fjord_reads_only_the_narrow_features():
    """The loss of every step is that of the model which its width cuts out."""
    method = Method((FedNH(), FjORD(widths="0.4,1")))
    loop, net = build_tiny_run(method, (5, 3, 4, 6))
    narrow = 0
    for visit in prepare_local_trainings(loop, loop.start(net)):
        for rows, scene in zip(visit.rows, make_step_contexts(method, visit)):
            batch, params = visit.device.samples.take_batch(rows), visit.state.params
            scorer = StepRule(net, method, Optimiser()).make_scorer(visit.state.buffers)
            local = Local(net, scene.anchor, {}, scene.numbers, scene.draws["fjord"], {})
            found = method.parts[1].objective(scorer, local)(params, batch).loss
            width = int(scene.draws["fjord"]["a"].sum())
            plan = Plan({"a": torch.arange(width)})
            small = net.slicer.take(params | visit.state.buffers, plan)
            logits = net.cut(plan).forward(small, batch.inputs)[0]
            torch.testing.assert_close(found, F.cross_entropy(logits, batch.targets[0][0]))
            narrow += width < 3
    assert narrow


def test_what_reads_the_features_never_moves():
    part, net = FedNH(), FedNH().model(build_tiny_net())
    local = Local(net, net.initial, {}, {}, {}, {})
    update = {k: torch.ones_like(net.initial[k]) for k in net.trainable}
    scored = StepRule(net, Method((part,)), Optimiser()).make_scorer({k: net.initial[k] for k in net.buffers})(
        {k: net.initial[k] for k in net.trainable}, Batch(torch.randn(2, 4).double(), ((torch.tensor([0, 1]), None),))
    )
    moved, _ = part.step(update, {}, scored, local)
    assert [k for k, u in moved.items() if not u.any()] == [READ]
    device = device_of(net, torch.zeros(1, 4), torch.zeros(1))
    begun, _ = part.begin(net.initial | {READ: torch.zeros(1, 3)}, {}, device)
    assert (begun[READ] == 1).all()


# whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fednh+fjord", "fednh+fedprox", "fednh(rho=0.5)+feddrop+topk"])
def test_combinations_train_side_by_side(method: str, caplog: pytest.LogCaptureFixture):
    setting = corners() | {"rounds": 4, "precision": "float64"}
    ends = [shoal.run(method, engine=engine, **setting) for engine in ("serial", "batched")]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    for name, value in ends[0].params.items():
        torch.testing.assert_close(value, ends[1].params[name], atol=1e-9, rtol=0)
    assert ends[1].history.rows[-1]["accuracy"] > 0.8


def test_devices_that_drop_out_do_not_matter():
    found = shoal.run("fednh", rounds=4, failures=0.4, engine="batched", **corners())
    assert any(row.get("dropped") for row in found.history.rows)
    torch.testing.assert_close(found.params["fc2.prototypes.weight"].norm(dim=1), torch.ones(3))


# refusals ------------------------------------------------------------------------------------------------------------


def test_values_out_of_range_are_refused():
    for wrong in ({"rho": 1.1}, {"rho": -0.1}, {"scale": 0.0}, {"scale": float("inf")}):
        with pytest.raises(ValueError, match="fednh needs 0 <= rho <= 1 and scale > 0"):
            FedNH(**wrong)


def test_a_last_linear_layer_that_does_not_make_the_logits_is_refused():
    net = Net(nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2)), nn.Flatten(), nn.Softmax(1)), (4,), 3)
    with pytest.raises(ShoalError, match="fednh needs 3 prototypes, and the last linear layer has 6 rows"):
        FedNH().model(net)
