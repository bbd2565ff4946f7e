"""MOON: hand-worked losses, whose model the previous one is, what three passes cost, and sub-models."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from math import exp, log

import pytest
import torch
from corners import corners
from tiny_parts import CutOnce, HalfWidth
from torch import Tensor, nn

import shoal
from shoal.core.batch import Batch, BatchScore
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.local.step import StepContext, StepRule, advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Params
from shoal.core.part import Part
from shoal.core.types import Local, Optimiser
from shoal.models.lenet import lenet
from shoal.models.lstm import lstm
from shoal.models.resnet import build_resnet
from shoal.parts.fedap import FedAP
from shoal.parts.fjord import FjORD
from shoal.parts.mixup import Mixup
from shoal.parts.moon import MOON, fill_missing_units
from shoal.plugins.smoke_run import build_tiny_net, build_tiny_run, prepare_local_trainings
from shoal.testing.hosts import RecordingHost
from shoal.testing.laws import check_pair
from shoal.testing.rounds import assert_trees_close, play_rounds

DOUBLE = torch.float64


@pytest.mark.parametrize("other", [FjORD(), Mixup(), HalfWidth(), CutOnce()], ids=str)
def test_pairs(other: Part):
    check_pair(MOON(), other)
    check_pair(other, MOON())


@pytest.mark.parametrize("wrong", [{"mu": -1.0}, {"mu": float("nan")}, {"temperature": 0.0}, {"width": -1}], ids=str)
def test_values_out_of_range_are_refused(wrong: dict):
    with pytest.raises(ValueError, match="moon needs"):
        MOON(**wrong)


@pytest.mark.parametrize("width", [0, 256])
def test_a_model_without_a_linear_layer_is_refused(width: int):
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4), 3)
    with pytest.raises(ShoalError, match="moon works on the last linear layer"):
        MOON(width=width).model(net)


# one batch, seen closely ---------------------------------------------------------------------------------------------

EYE, SWAP, FIRST = ([[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 0], [0, 0]])


def net_of(width: int = 2, classes: int = 3) -> Net:
    torch.manual_seed(0)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        a=nn.Linear(width, width, bias=False), b=nn.Linear(width, classes)
    )
    return Net(nn.Sequential(layers).double(), (width,), classes)


def looks(a: list[list[int]]) -> Params:
    """The parameters of a model whose features are `a` times its inputs."""
    return net_of().initial | {"a.weight": torch.tensor(a, dtype=DOUBLE)}


def seen(
    part: MOON, params: Params, received: Params, previous: Params, batch: Batch, net: Net | None = None
) -> BatchScore:
    net = net or net_of()
    local = Local(net, received, {}, {}, {}, {"previous": previous})
    return part.objective(StepRule(net, Method(), Optimiser()).make_scorer({}), local)(params, batch)


def term(part: MOON, params: Params, received: Params, previous: Params, batch: Batch, net: Net | None = None) -> float:
    """What the part adds to the loss."""
    own, plain = (seen(replace(part, mu=mu), params, received, previous, batch, net).loss for mu in (part.mu, 0.0))
    return float(own - plain)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def batch_of(inputs: list, targets: list) -> Batch:
    return Batch(torch.tensor(inputs, dtype=DOUBLE), ((torch.tensor(targets), None),))


def test_by_hand():
    """z = (3, 4), z_received = (4, 3), z_previous = (3, 0): the cosines are 24/25 and 3/5."""
    batch = batch_of([[3, 4]], [1])
    found = term(MOON(mu=2.0, temperature=0.5, width=0), looks(EYE), looks(SWAP), looks(FIRST), batch)
    right, wrong = exp(0.96 / 0.5), exp(0.6 / 0.5)
    assert found == pytest.approx(-2 * log(right / (right + wrong)), abs=1e-12)
    other = term(MOON(mu=1.0, temperature=0.1, width=0), looks(EYE), looks(FIRST), looks(SWAP), batch)
    assert other == pytest.approx(log(1 + exp(3.6)), abs=1e-12), "received and previous change places"


def test_padding_positions_and_blends():
    """(3, 4) costs log(1 + exp(-0.72)); (1, 0) has the cosines 0 and 1, and costs log(1 + exp(2))."""
    part, models = MOON(mu=1.0, width=0), (looks(EYE), looks(SWAP), looks(FIRST))
    one, two = log(1 + exp(-0.72)), log(1 + exp(2.0))
    batch = batch_of([[3, 4], [1, 0], [5, 6]], [0, 1, 2])
    padded = batch._replace(weight=torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE))
    assert term(part, *models, padded) == pytest.approx((one + two) / 2, abs=1e-12)
    alone = batch._replace(weight=torch.tensor([0.0, 1.0, 0.0], dtype=DOUBLE))
    assert term(part, *models, alone) == pytest.approx(two, abs=1e-12)
    y, share = batch.targets[0][0], torch.full((3,), 0.3, dtype=DOUBLE)
    blended = padded._replace(targets=((y, share), (y.flip(0), 1 - share)))
    assert term(part, *models, blended) == pytest.approx((one + two) / 2, abs=1e-12)
    text = batch_of([[[3, 4], [3, 4]], [[3, 4], [1, 0]]], [[0, 1], [1, 2]])
    assert term(part, *models, text) == pytest.approx((3 * one + two) / 4, abs=1e-12)


def test_the_gradient_against_finite_differences_and_only_through_the_local_model():
    net = MOON(width=4).model(net_of())
    models = [{k: drawn(*v.shape, seed=i).requires_grad_() for k, v in net.initial.items()} for i in range(3)]
    batch = batch_of([[3, 4], [1, -2]], [0, 1])
    part, names = MOON(width=4), list(net.initial)

    def loss(*values: Tensor) -> Tensor:
        return seen(part, dict(zip(names, values)), models[1], models[2], batch, net).loss

    assert torch.autograd.gradcheck(loss, tuple(models[0].values()))
    inputs = [v for model in models[1:] for v in model.values()]
    assert not any(g is not None for g in torch.autograd.grad(loss(*models[0].values()), inputs, allow_unused=True))


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_features_of_0_are_finite(dead: int):
    models = [looks(EYE), looks(SWAP), looks(FIRST)]
    models[dead] = looks([[0, 0], [0, 0]])
    own = {k: v.requires_grad_() for k, v in models[0].items()}
    loss = seen(MOON(width=0), own, models[1], models[2], batch_of([[3, 4]], [0])).loss
    assert all(bool(g.isfinite().all()) for g in (loss, *torch.autograd.grad(loss, list(own.values()))))


def test_all_three_models_are_as_narrow_as_the_local_one():
    """Listed before fjord, models of the same narrow part say the same; listed behind it, the others are wide."""
    part = MOON(mu=1.0, width=4)
    net = part.model(build_tiny_net())
    draws, batch = (
        {"a": torch.tensor([1.0, 0.0, 0.0], dtype=DOUBLE)},
        Batch(drawn(2, 4), ((torch.tensor([0, 1]), None),)),
    )
    wide = net.initial | {"a.weight": net.initial["a.weight"] * torch.tensor([[1.0], [5.0], [-3.0]], dtype=DOUBLE)}
    local = Local(net, net.initial, {}, {}, draws, {"previous": wide})
    score, fjord = StepRule(net, Method(), Optimiser()).make_scorer({}), FjORD()
    narrow = fjord.objective(score, local)(net.initial, batch).loss
    before = part.objective(fjord.objective(score, local), local)(net.initial, batch).loss
    behind = fjord.objective(part.objective(score, local), local)(net.initial, batch).loss
    assert float(before - narrow) == pytest.approx(log(2), abs=1e-12)
    assert abs(float(behind - narrow) - log(2)) > 1e-6


# the model -----------------------------------------------------------------------------------------------------------


def test_two_layers_stand_before_the_last_one():
    net = MOON(width=5).model(build_tiny_net())
    x = drawn(4, 4)
    logits, z, _, _ = net.forward(net.initial, x)
    p, features = net.initial, build_tiny_net().forward(build_tiny_net().initial, x)[1]
    hidden = (features @ p["b.hidden.weight"].T + p["b.hidden.bias"]).relu()
    torch.testing.assert_close(z, hidden @ p["b.z.weight"].T + p["b.z.bias"])
    torch.testing.assert_close(logits, z @ p["b.out.weight"].T + p["b.out.bias"])
    assert z.shape == (4, 5) and net.head_name == "b.out" and set(net.shared_trainable) == set(p)
    assert MOON(width=0).model(build_tiny_net()).initial.keys() == build_tiny_net().initial.keys()


def test_new_weights_follow_from_the_layer_they_replace_and_from_nothing_else():
    before = torch.get_rng_state()
    first, again = (MOON().model(build_tiny_net()).initial for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()) and tree.is_same_tree(first, again)
    single = MOON().model(replace(build_tiny_net(), module=build_tiny_net().module.float())).initial
    torch.testing.assert_close(single, {k: v.float() for k, v in first.items()})
    changed = build_tiny_net()
    changed.initial["b.weight"][0, 0] += 1
    assert not torch.equal(MOON().model(changed).initial["b.z.weight"], first["b.z.weight"])
    assert all(float(first[f"b.{k}.weight"].abs().max()) <= n**-0.5 for k, n in (("hidden", 3), ("z", 3), ("out", 256)))


def test_a_layer_without_bias_gets_none():
    net = net_of()
    net.module.get_submodule("b").register_parameter("bias", None)
    assert "b.out.bias" not in MOON().model(Net(net.module, (2,), 3)).initial


def test_lenet_by_numbers():
    """84-84-256-10 in place of 84-10; FedDHAD's 0.689 M has one more layer of 84 x 84."""
    plain, net = lenet((3, 32, 32), 10), MOON().model(lenet((3, 32, 32), 10))
    assert plain.macs_forward == 651_720
    assert net.macs_forward == 651_720 + 84 * 84 + 84 * 256 + 256 * 10 - 84 * 10 == 682_000
    assert round(net.macs_forward + 84 * 84, -3) == 689_000
    assert sum(v.numel() for v in net.initial.values()) == 62_006 + 85 * 84 + 85 * 256 + 257 * 10 - 85 * 10 == 92_626


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize(
    "make",
    [
        lambda: lenet((3, 32, 32), 10),
        lambda: build_resnet((3, 8, 8), 10, width=4),
        lambda: lstm((5,), 10, width=6),
    ],
    ids=["lenet", "resnet", "lstm"],
)
def test_masked_and_cut_out_models_train_alike(make: Callable[[], Net], width: int):
    part, plain = MOON(width=width), make()
    net = part.model(replace(plain, module=plain.module.double()))
    plan = Plan({a.name: torch.arange(0, a.size, 2) for a in net.axes})
    last = {k: net.initial[k] + 0.1 * drawn(*net.initial[k].shape) for k in net.shared_trainable}
    small = net.slicer.take(net.initial, plan)
    anchor = net.slicer.place(small, net.initial, plan)
    x, y = drawn(3, *net.input_shape, seed=1), torch.tensor([1, 2, 3])
    if net.token_inputs:
        x = y = torch.arange(15).view(3, 5) % 10
    masks = {k: net.slicer.covered_mask(k, anchor[k], plan) for k in net.trainable}
    mask = {k: m.double() for k, m in masks.items() if m is not None}
    masked = trained(part, net, anchor, plan, last, mask, x, y)
    sliced = trained(part, net.cut(plan), small, WHOLE_MODEL, net.slicer.take(last, plan), {}, x, y)
    assert_trees_close(net.slicer.take(masked, plan), sliced, 1e-9, "masked and sliced models part ways")


def trained(part: Part, net: Net, anchor: Params, plan: Plan, last: Params, mask: Params, x: Tensor, y: Tensor):
    """The parameters after two steps of a device that remembers a model."""
    loop, tiny = build_tiny_run(Method())
    device = replace(prepare_local_trainings(loop, loop.start(tiny))[0].device, net=net, anchor=anchor, plan=plan)
    params, state = part.begin(anchor, {"previous": last}, device)
    rule = StepRule(net, Method((part,)), Optimiser())
    course = rule.init_state(params, {part.name(): state})
    scene = StepContext(anchor, {}, {"lr": torch.tensor(0.1, dtype=DOUBLE)}, {}, mask)
    for _ in range(2):
        course, _ = advance(rule, course, Batch(x, ((y, None),)), scene, compute_autograd_gradient)
    assert not torch.equal(course.params[net.trainable[0]], params[net.trainable[0]])
    return course.params


# rounds --------------------------------------------------------------------------------------------------------------


def test_at_first_contact_the_received_model_is_the_previous_one():
    """Both cosines are the same then: the term is log 2 and its gradient 0, so the round is FedAvg's."""
    part = MOON(mu=3.0, width=4)
    loop, net = build_tiny_run(Method((part,)))
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    assert tree.is_same_tree(
        visit.state.states["moon"]["previous"], tree.select_params(visit.context.anchor, net.shared_trainable)
    )
    batch = visit.device.samples.take_all()
    moved = {k: v + 0.3 for k, v in net.initial.items()}
    assert term(part, moved, net.initial, net.initial, batch, net) == pytest.approx(3 * log(2), abs=1e-12)
    first, _ = play_rounds(loop, loop.start(net), 0, 1)
    plain, _ = build_tiny_run(Method((MOON(mu=0.0, width=4),)))
    assert_trees_close(
        first.params, play_rounds(plain, plain.start(net), 0, 1)[0].params, 1e-12, "the first round is not FedAvg's"
    )
    second, third = play_rounds(loop, first, 1, 2)[0], play_rounds(plain, first, 1, 2)[0]
    assert float((second.params["a.weight"] - third.params["a.weight"]).abs().max()) > 1e-6


def test_the_previous_model_is_the_device_s_own_last_one():
    loop, net = build_tiny_run(Method((MOON(width=4),)), (5, 3, 4))
    spy, standing = RecordingHost(loop.host), loop.start(net)
    for number in range(3):
        before = standing.params
        standing, _ = play_rounds(replace(loop, host=spy), standing, number, number + 1)
        for job, outcome in zip(spy.jobs[-1], spy.outcomes[-1]):
            assert outcome.message is not None
            own = {k: before[k] + entry["value"] for k, entry in outcome.message.body.items()}
            assert_trees_close(
                loop.host.memory.get(job.device)["moon"]["previous"], own, 1e-15, "not what the device came back with"
            )
    for visit in prepare_local_trainings(loop, standing, 3):
        state = visit.state.states["moon"]["previous"]
        assert tree.is_same_tree(state, loop.host.memory.get(visit.device.id)["moon"]["previous"])


def test_a_unit_that_a_device_never_held_is_taken_as_received():
    """In other rounds it holds other units; what it lacks now is not there, what it lacked so far is as it arrived."""
    loop, net = build_tiny_run(compose([MOON(width=4), HalfWidth()]))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    kept = loop.host.memory.get(0)["moon"]["previous"]
    assert not kept["a.weight"][0].any() and kept["a.weight"][1:].all()
    visit = prepare_local_trainings(loop, standing, 1)[0]
    state, anchor = visit.state.states["moon"]["previous"], visit.context.anchor
    assert torch.equal(state["a.weight"][0], anchor["a.weight"][0]) and torch.equal(
        state["a.bias"][0], anchor["a.bias"][0]
    )
    assert torch.equal(state["a.weight"][2], kept["a.weight"][2]) and not state["a.weight"][1].any()
    assert torch.equal(state["b.hidden.weight"][:, 0], anchor["b.hidden.weight"][:, 0])
    play_rounds(loop, standing, 1, 2)
    assert torch.equal(loop.host.memory.get(0)["moon"]["previous"]["a.weight"][1], kept["a.weight"][1])
    assert fill_missing_units({"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})["w"].tolist() == [
        3.0,
        2.0,
    ]


def test_at_mu_0_it_is_fedavg_on_the_same_model_bit_for_bit():
    ends = []
    for method in (Method((MOON(mu=0.0),)), Method()):
        loop, net = build_tiny_run(method)
        if not method.parts:
            net = MOON().model(net)
            loop.host.resize(net, WHOLE_MODEL)
        ends.append(play_rounds(loop, loop.start(net), 0, 3)[0].params)
    assert tree.is_same_tree(*ends)


def test_three_forward_passes_and_one_backward_are_counted():
    """Beside FedAvg on the same model: two forward passes of the 8 samples."""
    rows = []
    for method in (Method((MOON(),)), Method()):
        loop, net = build_tiny_run(method)
        if not method.parts:
            net = MOON().model(net)
            loop.host.resize(net, WHOLE_MODEL)
        rows.append(play_rounds(loop, loop.start(net), 0, 1)[1][0])
    macs = 4 * 3 + 3 * 3 + 3 * 256 + 256 * 2
    assert rows[0]["macs_forward"] == rows[1]["macs_forward"] == macs
    assert rows[0]["macs_work"] == rows[1]["macs_work"] + 2 * 8 * macs
    assert rows[0]["macs_work"] == 8 * (3 * macs + 2 * macs - 4 * 3), "the inputs have no gradient"


def test_the_new_layers_travel_and_nothing_else_does():
    loop, net = build_tiny_run(Method((MOON(width=4),)))
    _, rows = play_rounds(loop, loop.start(net), 0, 1)
    size = 8 * (5 * 3 + 4 * 3 + 4 * 4 + 5 * 2)
    assert rows[0]["bytes_down"] == rows[0]["bytes_up"] == 2 * size


@pytest.mark.parametrize("part", [CutOnce(), FedAP(at=2, rule="fixed", rate=0.5)], ids=str)
def test_memories_are_cut_along_when_the_model_is_pruned(part: Part):
    loop, net = build_tiny_run(compose([MOON(width=4), part]), (5, 3, 4))
    standing, _ = play_rounds(loop, loop.start(net), 0, 3)
    shapes = {k: v.shape for k, v in standing.params.items()}
    assert shapes["a.weight"][0] < 3 and shapes["b.hidden.weight"] == (3, shapes["a.weight"][0])
    for device in range(3):
        assert {k: v.shape for k, v in loop.host.memory.get(device)["moon"]["previous"].items()} == shapes


# whole runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize(
    "method",
    ["moon", "moon+fjord", "moon(mu=1.0)+topk", "moon+fedap(at=2, rule='fixed', rate=0.5)", "mixup+moon+feddrop"],
)
def test_combinations_train_side_by_side(method: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        setting = corners() | {"rounds": 4, "precision": "float64"}
        ends = [shoal.run(method, engine=engine, **setting) for engine in ("serial", "batched")]
    assert not caplog.records
    for name, value in ends[0].params.items():
        torch.testing.assert_close(value, ends[1].params[name], atol=1e-9, rtol=0)
    assert ends[1].history.rows[-1]["accuracy"] > 0.6
