"""CReFF: gradients against autograd, matching and retraining step by step, what travels and what is judged."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_parts import CutOnce, HalfWidth, ServerJoins, Sparse
from torch import Tensor, nn

import shoal
from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.server_state import EnrolmentRegister
from shoal.core.streams import RandomStreams
from shoal.core.types import Device, Outcome, Reply, Round
from shoal.core.wire import pack_bits, unpack_bits
from shoal.data.user_data import build_user_dataset
from shoal.parts.creff import CReFF, compute_gradient_distance, join_weight_bias, split_weight_bias
from shoal.parts.fednh import FedNH
from shoal.parts.heterofl import HeteroFL
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.hosts import RecordingHost
from shoal.testing.laws import check_pair
from shoal.testing.rounds import play_rounds

QUICK = CReFF(features=3, match_steps=4, epochs=2, batch=2)
WEIGHT, BIAS = "b.weight", "b.bias"


@pytest.mark.parametrize("other", [FedNH(), HeteroFL(), HalfWidth(), Sparse(), ServerJoins(), CutOnce()], ids=str)
def test_pairs(other: Part):
    check_pair(QUICK, other)
    check_pair(other, QUICK)


# what devices tell ---------------------------------------------------------------------------------------------------


def told_by(net: Net, inputs: Tensor, targets: Tensor, head: Params, plan: Plan = WHOLE_MODEL) -> dict[str, Tensor]:
    samples = Samples(inputs, targets, torch.arange(len(inputs)))
    device = Device(0, 0, samples, net, {}, net.initial, {}, {"head": head}, plan, RandomStreams(0), "creff")
    return QUICK.measure(net.initial | {"a.weight": torch.zeros(3, 4).double()}, {}, device)


def test_a_gradient_worked_out_by_hand():
    """With a head of zeros both classes have 1/2; a feature of 2 and one of 4 make (p - y) x = -+1 and -+2."""
    module = nn.Sequential(OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 2))).double()
    nn.init.ones_(module.get_parameter("a.weight"))
    nn.init.zeros_(module.get_parameter("a.bias"))
    head = {WEIGHT: torch.zeros(2, 1).double(), BIAS: torch.zeros(2).double()}
    told = told_by(Net(module, (1,), 2), torch.tensor([[2.0], [4.0]]).double(), torch.tensor([1, 1]), head)
    assert unpack_bits(told["held"], torch.Size([2])).tolist() == [False, True]
    assert told["slopes"].tolist() == [[1.5, 0.5, -1.5, -0.5]]


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_head_that_was_sent_on_the_features_that_were_received(bias: bool):
    torch.manual_seed(0)
    module = nn.Sequential(OrderedDict(a=nn.Linear(4, 3), relu=nn.ReLU(), b=nn.Linear(3, 5, bias=bias))).double()
    net = Net(module, (4,), 5)
    x, y = torch.randn(9, 4).double(), torch.tensor([0, 3, 3, 1, 0, 3, 3, 1, 3])
    head = {k: torch.randn(net.initial[k].shape).double() for k in (WEIGHT, BIAS) if k in net.initial}
    told = told_by(net, x, y, head)
    assert unpack_bits(told["held"], torch.Size([5])).nonzero().flatten().tolist() == [0, 1, 3]
    features = net.forward(net.initial, x)[1]
    for label, slope in zip((0, 1, 3), told["slopes"].unflatten(1, (5, -1)), strict=True):
        leaves = [v.requires_grad_() for v in head.values()]
        loss = F.cross_entropy(F.linear(features[y == label], *leaves), y[y == label])
        expected = dict(zip(head, torch.autograd.grad(loss, leaves)))
        found = split_weight_bias(slope, head)
        assert all(torch.allclose(found[k], expected[k], atol=1e-12) for k in head)
        head = {k: v.detach() for k, v in head.items()}


# what the server makes of it -----------------------------------------------------------------------------------------


def a_round(told: list[tuple[list[int], Tensor]], weights: list[float], plans: dict[int, Plan] | None = None) -> Round:
    """Replies with gradients of these classes; the tiny net has 2 classes and 3 features, and so 8 elements."""
    loop, net = build_tiny_run(Method((QUICK,)), (2,) * len(told))
    round = loop.make_round(loop.start(net), 0, EnrolmentRegister({}, loop.host.enrol))
    plans = {d: WHOLE_MODEL for d in range(len(told))} | (plans or {})
    replies = []
    for device, (held, slopes) in enumerate(told):
        mask = torch.zeros(2, dtype=torch.bool).index_fill(0, torch.tensor(held), True)
        report = {"creff": {"held": pack_bits(mask), "slopes": slopes.double()}}
        replies.append(Reply(device, 2, {}, {}, report, Outcome(device), plans[device]))
    return replace(round, replies=replies, plans=plans, weights=torch.tensor(weights).double(), part="creff")


def test_gradients_are_averaged_over_the_devices_that_hold_the_class():
    first, second, idle = torch.arange(16.0).view(2, 8), torch.full((1, 8), 4.0), torch.full((2, 8), 99.0)
    round = a_round([([0, 1], first), ([1], second), ([0, 1], idle)], [0.5, 0.5, 0.0])
    head = {k: round.anchor[k] for k in (WEIGHT, BIAS)}
    mean, seen = QUICK.average_class_gradients(head, round)
    assert mean[0].flatten().tolist() == list(range(8)) and seen.all()
    assert mean[1].flatten().tolist() == [(8 + i + 4) / 2 for i in range(8)]


def test_gradients_of_slices_are_averaged_over_the_devices_that_hold_a_column():
    """Device 1 has features 0 and 2 only, device 2 feature 0: nobody tells class 1 of feature 1."""
    plans = {1: Plan({"a": torch.tensor([0, 2])}), 2: Plan({"a": torch.tensor([0])})}
    slices = [([0], torch.ones(1, 8)), ([0, 1], torch.arange(12.0).view(2, 6)), ([1], torch.full((1, 4), 2.0))]
    round = a_round(slices, [1.0] * 3, plans)
    mean, seen = QUICK.average_class_gradients({k: round.anchor[k] for k in (WEIGHT, BIAS)}, round)
    assert mean[0].tolist() == [[0.5, 1.0, 1.0, 1.5], [2.0, 1.0, 2.5, 3.0]] and seen[0].all()
    assert mean[1].tolist() == [[4.0, 0.0, 7.0, 5.0], [5.5, 0.0, 10.0, 6.5]]
    assert seen[1].tolist() == [[True, False, True, True]] * 2


def matching(classes: int = 3, width: int = 4, bias: bool = True) -> tuple[Tensor, Tensor, Params]:
    """Virtual features to start from, the gradients of other ones, and a head."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    head = {WEIGHT: drawn(classes, width)} | ({BIAS: drawn(classes)} if bias else {})
    real = drawn(classes, 20, width).abs()
    return (
        drawn(classes, 3, width),
        torch.stack([join_weight_bias(slope(real[c], c, head)) for c in range(classes)]),
        head,
    )


def slope(features: Tensor, label: int, head: Params, graph: bool = False) -> Params:
    leaves = [v.detach().requires_grad_() for v in head.values()]
    loss = F.cross_entropy(F.linear(features, *leaves), torch.full((len(features),), label))
    return dict(zip(head, torch.autograd.grad(loss, leaves, create_graph=graph)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", [[0, 1, 2, 3], [0, 1, 3]], ids=["whole", "one column nobody told of"])
def test_a_step_of_matching_is_the_one_that_two_derivatives_give(bias: bool, columns: list[int]):
    made, target, head = matching(bias=bias)
    seen = torch.ones_like(target) > 0
    seen[..., 2] = 2 in columns
    found = CReFF(features=3, match_steps=1, match_lr=0.7).optimise_features(made, target * seen, seen, head)
    for label in range(3):
        leaf = made[label].clone().requires_grad_()
        own, real = slope(leaf, label, head, graph=True), split_weight_bias(target[label], head)
        rows = [(own[WEIGHT][j, columns], real[WEIGHT][j, columns]) for j in range(3)] + (
            [(own[BIAS], real[BIAS])] if bias else []
        )
        far = torch.stack([1 - a @ b / (a.norm() * b.norm() + 1e-6) for a, b in rows]).sum()
        (gradient,) = torch.autograd.grad(far, leaf)
        torch.testing.assert_close(found[label], made[label] - 0.7 * gradient, atol=1e-12, rtol=0)


def test_matching_brings_gradients_together_where_they_were_told():
    made, target, head = matching()
    seen = torch.ones_like(target) > 0
    seen[1] = False
    before, kept = [far_of(made, target, head, c) for c in range(3)], made.clone()
    found = CReFF(features=3, match_steps=200, match_lr=1.0).optimise_features(made, target * seen, seen, head)
    after = [far_of(found, target, head, c) for c in range(3)]
    assert torch.equal(made, kept) and torch.equal(found[1], made[1])
    assert after[0] < before[0] / 2 and after[2] < before[2] / 2


def far_of(made: Tensor, target: Tensor, head: Params, label: int) -> float:
    own = join_weight_bias(slope(made[label], label, head))
    return float(compute_gradient_distance(own[None], target[label][None], made.shape[2]))


def test_gradients_of_0_can_be_matched():
    made, target, head = matching()
    found = CReFF(features=3).optimise_features(made, torch.zeros_like(target), torch.ones_like(target) > 0, head)
    assert found.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_retraining_is_sgd_on_the_virtual_features(bias: bool):
    made, _, head = matching(bias=bias)
    kept = {k: v.clone() for k, v in head.items()}
    found = CReFF(features=3, epochs=3, lr=0.2, batch=4).retrain_classifier(made, head, np.random.default_rng(5))
    draw, layer = np.random.default_rng(5), nn.Linear(4, 3, bias=bias).double()
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), head.values(), strict=True):
            parameter.copy_(value)
    optimiser = torch.optim.SGD(layer.parameters(), 0.2)
    for _ in range(3):
        for rows in torch.from_numpy(draw.permutation(9)).split(4):
            optimiser.zero_grad()
            F.cross_entropy(layer(made.flatten(0, 1)[rows]), rows // 3).backward()
            optimiser.step()
    for name, parameter in zip(head, layer.parameters(), strict=True):
        torch.testing.assert_close(found[name], parameter.detach(), atol=1e-12, rtol=0)
        assert torch.equal(head[name], kept[name])


# rounds --------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_classes_that_a_device_holds():
    """The tiny run has numbers of 8 bytes and 8 elements in its last layer; its device of one sample has one class."""
    loop, net = build_tiny_run(Method((QUICK,)), (5, 1))
    spy = RecordingHost(loop.host)
    play_rounds(replace(loop, host=spy), loop.start(net), 0, 1)
    up = [o.message.bytes_by["creff"] for o in spy.outcomes[0] if o.message]
    assert up == [1 + 8 * 8 * 2, 1 + 8 * 8]
    assert [j.message.bytes_by["creff"] for j in spy.jobs[0]] == [8 * 8] * 2


def test_devices_learn_as_with_fedavg_and_the_retrained_head_is_judged():
    ends = []
    for method in (Method(), Method((CReFF(features=5, epochs=20, lr=0.5),))):
        loop, net = build_tiny_run(method, (5, 3, 4))
        ends.append((loop, *play_rounds(loop, loop.start(net), 0, 3)))
    (_, plain, _), (loop, standing, rows) = ends
    assert all(torch.equal(plain.params[k], v) for k, v in standing.params.items())
    head = standing.states["creff"]["head"]
    assert not torch.allclose(head[WEIGHT], standing.params[WEIGHT])
    final = loop.make_final_params(standing, 3)
    assert all(torch.equal(final[k], (standing.params | head)[k]) for k in final)
    assert rows[-1]["loss"] == loop.evaluate_model(standing.net, final)["loss"]


def test_the_head_that_is_sent_is_the_one_retrained_the_round_before():
    loop, net = build_tiny_run(Method((QUICK,)))
    spy = RecordingHost(loop.host)
    loop, before = replace(loop, host=spy), loop.start(net)
    for number in range(3):
        after, _ = play_rounds(loop, before, number, number + 1)
        sent = spy.jobs[number][0].message.beside["creff"]["head"]
        assert all(torch.equal(sent[k], v) for k, v in before.states["creff"]["head"].items())
        assert number or all(torch.equal(v, net.initial[k]) for k, v in sent.items())
        before = after


def test_virtual_features_are_cut_along_when_the_model_is_pruned():
    loop, net = build_tiny_run(Method((QUICK, CutOnce())))
    first = loop.start(net)
    pruned, rows = play_rounds(loop, first, 0, 1)
    state = pruned.states["creff"]
    assert first.states["creff"]["features"][WEIGHT].shape == (2, 3, 3)
    assert state["features"][WEIGHT].shape == (2, 2, 3) and state["head"][WEIGHT].shape == (2, 2)
    later, rows = play_rounds(loop, pruned, 1, 3)
    assert later.states["creff"]["features"][WEIGHT].shape == (2, 2, 3) and not any(r.get("void") for r in rows)


# whole runs ----------------------------------------------------------------------------------------------------------


def blobs() -> Iterator[tuple[Tensor, Tensor]]:
    """Three classes around three corners, most samples of the first; a device of one class, and one of one sample."""
    generator = torch.Generator().manual_seed(0)
    few, many = torch.tensor([0, 1, 2]), torch.zeros(9, dtype=torch.long)
    for labels in (*[torch.cat((many, few))] * 4, many, torch.tensor([1]), few.repeat(20)):
        yield torch.eye(3, 6)[labels] * 3 + torch.randn(len(labels), 6, generator=generator), labels


def setting(**more) -> dict:
    *own, test = blobs()
    data = build_user_dataset(own, test=test)
    return {"data": data, "split": "owner", "devices": 6, "sample": 6, "batch": 4, "lr": 0.05, "model": "mlp"} | more


@pytest.mark.parametrize("extra", ["+feddrop+topk", "+fjord", "+fednh"])
def test_combinations_train_side_by_side(extra: str, caplog: pytest.LogCaptureFixture):
    method = f"creff(features=10, match_steps=20, epochs=20){extra}"
    ends = [shoal.run(method, engine=e, **setting(rounds=3, precision="float64")) for e in ("serial", "batched")]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    for name, value in ends[0].params.items():
        torch.testing.assert_close(value, ends[1].params[name], atol=1e-9, rtol=0)


def test_a_retrained_head_favours_no_class():
    found = [shoal.run(m, engine="batched", **setting(rounds=4)) for m in ("fedavg", "creff(epochs=50)")]
    plain, better = (run.history.rows[-1]["accuracy"] for run in found)
    assert better > plain + 0.1


def test_devices_that_drop_out_do_not_matter():
    found = shoal.run("creff(features=5, match_steps=5, epochs=5)", **setting(rounds=4, failures=0.5, engine="batched"))
    assert any(row.get("dropped") for row in found.history.rows)
    assert all(np.isfinite(row["loss"]) for row in found.history.rows)


# refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"features": 0}, {"features": 10**6}, {"batch": 0}, {"match_steps": -1}, {"epochs": 10**7}, {"lr": -1.0}],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong: dict):
    with pytest.raises(ValueError, match="creff needs"):
        CReFF(**wrong)


def test_a_model_that_answers_at_every_position_is_refused():
    module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    loop, _ = build_tiny_run(Method((QUICK,)))
    with pytest.raises(ShoalError, match=r"gives a sample a row of logits, and this model gives it \(1, 4, 5\)"):
        loop.start(Net(module, (4,), 5, token_inputs=True))


def test_a_model_without_a_linear_layer_is_refused():
    loop, _ = build_tiny_run(Method((QUICK,)))
    with pytest.raises(ShoalError, match="creff works on the last linear layer"):
        loop.start(Net(nn.Sequential(nn.Conv1d(1, 2, 4), nn.Flatten()), (1, 4), 2))
