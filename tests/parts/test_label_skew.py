"""Losses for devices whose labels are uneven: balanced softmax, FedLC, FedROD, FedNTD, FedDecorr."""

import logging
from collections import OrderedDict
from dataclasses import replace
from math import e, exp, log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.batch import Batch, BatchScore, Samples
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.local.device import PERSONAL_KEY, prepare_training
from shoal.core.local.step import (
    LocalState,
    StepContext,
    StepRule,
    advance,
    compute_autograd_gradient,
)
from shoal.core.losses import compute_cross_entropy
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.part import Part
from shoal.core.task import Engine
from shoal.core.types import Device, Local, Optimiser
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.models.mlp import mlp
from shoal.parts.balanced_softmax import BalancedSoftmax
from shoal.parts.feddecorr import FedDecorr, sum_squared_correlations
from shoal.parts.feddrop import FedDrop
from shoal.parts.fedlc import FedLC
from shoal.parts.fedntd import FedNTD, compute_not_true_kl
from shoal.parts.fedrod import FedROD
from shoal.parts.fjord import FjORD
from shoal.plugins.smoke_run import build_tiny_net, build_tiny_run, make_step_contexts, prepare_local_trainings
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import assert_trees_close, play_rounds

PARTS: list[Part] = [BalancedSoftmax(), FedLC(), FedNTD(), FedDecorr(), FedROD()]
OTHERS: list[Part] = [BalancedSoftmax(0.3), FedLC(0.1), FedNTD(beta=0.5, tau=3.0), FedDecorr(2.0)]
DOUBLE = torch.float64


@pytest.mark.parametrize(
    "make",
    [
        lambda: BalancedSoftmax(-0.1),
        lambda: FedLC(float("inf")),
        lambda: FedLC(-1.0),
        lambda: FedNTD(beta=-1.0),
        lambda: FedNTD(tau=0.0),
        lambda: FedNTD(beta=float("nan")),
        lambda: FedDecorr(-0.1),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()


def test_two_that_replace_the_loss_are_refused():
    with pytest.raises(ShoalError, match="both replace the local loss"):
        compose([FedROD(), FedLC()])


# one batch, seen closely ------------------------------------------------------------------------------------------


def straight(classes: int) -> Net:
    """A model that says what it is told: its logits, and its features, are its inputs."""
    layer = nn.Linear(classes, classes).double()
    layer.weight.data, layer.bias.data = torch.eye(classes, dtype=DOUBLE), torch.zeros(classes, dtype=DOUBLE)
    return Net(nn.Sequential(OrderedDict(fc=layer)), (classes,), classes)


def device_of(net: Net, labels: list[int]) -> Device:
    """A device with these labels."""
    loop, tiny = build_tiny_run(Method())
    y = torch.tensor(labels)
    samples = Samples(torch.zeros(len(y), *net.input_shape, dtype=DOUBLE), y, torch.arange(len(y)))
    return replace(
        prepare_local_trainings(loop, loop.start(tiny))[0].device, net=net, samples=samples, anchor=net.initial
    )


def seen(part: Part, batch: Batch, labels: list[int], moved: dict[str, Tensor] | None = None) -> BatchScore:
    """The score of a batch whose inputs are the logits; `moved` are tensors that are no longer as received."""
    net = part.model(straight(batch.inputs.shape[-1]))
    _, state = part.begin(net.initial, {}, device_of(net, labels))
    local = Local(net, net.initial, {}, {}, {}, state)
    scorer = StepRule(net, Method(), Optimiser()).make_scorer({})
    return part.objective(scorer, local)(net.initial | (moved or {}), batch)


def one(logits: list[float], target: int) -> Batch:
    return Batch(torch.tensor([logits], dtype=DOUBLE), ((torch.tensor([target]), None),))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def blended(f: Tensor, a: Tensor, b: Tensor, share: float) -> Batch:
    """Two lists of targets, as Mixup makes them."""
    own = torch.full((len(f),), share, dtype=DOUBLE)
    return Batch(f, ((a, own), (b, 1 - own)))


# balanced softmax and FedLC ---------------------------------------------------------------------------------------


def test_balanced_softmax_by_hand():
    labels = [0, 0, 0, 1]
    found = float(seen(BalancedSoftmax(), one([1.0, 2.0, 3.0], 1), labels).loss)
    assert found == pytest.approx(log(0.75 * e + 0.25 * e**2 + 0.25e-12 * e**3) - log(0.25 * e**2), abs=1e-12)
    half = float(seen(BalancedSoftmax(0.5), one([1.0, 2.0, 3.0], 0), labels).loss)
    assert half == pytest.approx(log(0.75**0.5 * e + 0.5 * e**2 + 0.5e-6 * e**3) - log(0.75**0.5 * e), abs=1e-12)


def test_margins_of_fedlc_by_hand():
    labels = [0] * 16 + [1]
    f = [1.0, 2.0, 3.0]
    found = float(seen(FedLC(), one(f, 0), labels).loss)
    assert found == pytest.approx(log(1 + exp(1.0 - 0.5)), abs=1e-12), "16 samples: 1/2, one: 1, none: 100"
    absent = float(seen(FedLC(0.1), one(f, 2), labels).loss)
    assert absent == pytest.approx(log(exp(0.95) + exp(1.9) + exp(-7.0)) + 7.0, abs=1e-12)


@pytest.mark.parametrize("part", [BalancedSoftmax(), FedLC()], ids=str)
def test_even_labels_leave_cross_entropy(part: Part):
    f, y = drawn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    loss = seen(part, Batch(f, ((y, None),)), [0, 1, 2] * 4).loss
    torch.testing.assert_close(loss, compute_cross_entropy(f, y).mean())


@pytest.mark.parametrize("part", [BalancedSoftmax(), FedLC(), FedROD()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
def test_a_device_with_one_class_teaches_next_to_nothing_about_the_others(part: Part, dtype: torch.dtype):
    net = straight(4)
    net = replace(net, module=net.module.to(dtype))
    _, state = part.begin(net.initial, {}, device_of(net, [2, 2, 2]))
    head = {f"rod.{k}": torch.zeros_like(v) for k, v in zip(("weight", "bias"), net.initial.values())}
    f = drawn(3, 4).to(dtype).requires_grad_()
    inner = lambda params, batch: BatchScore(f.sum() * 0, f, f, {}, {}, {})  # noqa: E731
    scored = part.objective(inner, Local(net, {}, {}, {}, {}, state))(head, Batch(f, ((torch.full((3,), 2), None),)))
    grad = torch.autograd.grad(scored.loss, f)[0]
    assert bool(scored.loss.isfinite()) and float(grad.abs().max()) < 1e-9


@pytest.mark.parametrize("part", [BalancedSoftmax(0.7), FedLC(0.3)], ids=str)
def test_blends_and_positions_go_through_the_same_shift(part: Part):
    labels, f = [0, 0, 1, 2, 2, 2], drawn(4, 3)
    a, b = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 1, 0])
    alone = [seen(part, Batch(f, ((y, None),)), labels).loss for y in (a, b)]
    mixed = seen(part, blended(f, a, b, 0.3), labels).loss
    torch.testing.assert_close(mixed, 0.3 * alone[0] + 0.7 * alone[1])
    text = Batch(f.view(2, 2, 3), ((a.view(2, 2), None),))
    torch.testing.assert_close(seen(part, text, labels).loss, alone[0])


def test_words_are_counted_at_every_position():
    net = straight(4)
    samples = Samples(torch.zeros(3, 4), torch.tensor([[0, 1], [1, 1], [3, 3]]), torch.tensor([0, 1]))
    _, state = BalancedSoftmax().begin({}, {}, replace(device_of(net, [0]), samples=samples))
    expected = torch.tensor([0.25, 0.75, 0.25e-12, 0.25e-12], dtype=DOUBLE)
    torch.testing.assert_close(state["prior"].exp(), expected)


# FedNTD -----------------------------------------------------------------------------------------------------------


def test_not_true_distillation_by_hand():
    """Received (1/2, 1/4, 1/4), local (1/4, 1/4, 1/2) over the classes that are not true: KL = log(2) / 4."""
    teacher = torch.tensor([[99.0, log(2), 0.0, 0.0]], dtype=DOUBLE)
    local = torch.tensor([[-7.0, 0.0, 0.0, log(2)]], dtype=DOUBLE)
    found = compute_not_true_kl(teacher, local, torch.tensor([0]))
    assert found.tolist() == pytest.approx([log(2) / 4], abs=1e-12)


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_temperature_and_strength(tau: float):
    """The input is what the received model says, the bias what the local one has learned on top."""
    teacher = tau * torch.tensor([[0.0, log(2), 0.0, 0.0]], dtype=DOUBLE)
    moved = {"fc.bias": tau * torch.tensor([0.0, -log(2), 0.0, log(2)], dtype=DOUBLE)}
    batch = Batch(teacher, ((torch.tensor([0]), None),))
    plain = seen(FedNTD(beta=0.0), batch, [0], moved).loss
    full = seen(FedNTD(beta=3.0, tau=tau), batch, [0], moved).loss
    assert float(full - plain) == pytest.approx(3 * tau**2 * log(2) / 4, abs=1e-12)


def test_the_gradient_of_the_distance_against_finite_differences():
    teacher, local, y = drawn(3, 5), drawn(3, 5, seed=1).requires_grad_(), torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: compute_not_true_kl(teacher, x, y), local)
    grad = torch.autograd.grad(compute_not_true_kl(teacher, local, y).sum(), local)[0]
    assert not grad.gather(1, y[:, None]).any(), "the true class is not looked at"


@pytest.mark.parametrize("far", [50.0, 1e30])
def test_the_distance_is_finite_where_models_are_sure(far: float):
    local = torch.tensor([[far, 0.0, -far, 0.0], [far, far, 0.0, 0.0]], requires_grad=True)
    found = compute_not_true_kl(torch.zeros(2, 4), local, torch.tensor([0, 1])).sum()
    assert bool(found.isfinite()) and bool(torch.autograd.grad(found, local)[0].isfinite().all())


@pytest.mark.parametrize("classes", [1, 2])
def test_too_few_classes_leave_nothing_to_keep(classes: int):
    y = torch.zeros(4, dtype=torch.long)
    assert not compute_not_true_kl(drawn(4, classes), drawn(4, classes, seed=1), y).any()


def test_blends_and_positions_are_told_apart_from_their_own_classes():
    f, a, b = drawn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 1, 0])
    part, moved = FedNTD(beta=2.0), {"fc.bias": drawn(3, seed=2)}
    alone = [seen(part, Batch(f, ((y, None),)), [0], moved).loss for y in (a, b)]
    mixed = seen(part, blended(f, a, b, 0.3), [0], moved).loss
    torch.testing.assert_close(mixed, 0.3 * alone[0] + 0.7 * alone[1])
    text = Batch(f.view(2, 2, 3), ((a.view(2, 2), None),))
    torch.testing.assert_close(seen(part, text, [0], moved).loss, alone[0])


def test_the_received_model_is_as_narrow_as_the_local_one():
    """Listed before fjord, at the anchor both say the same; listed behind it, the received model is the wide one."""
    net, draws = build_tiny_net(), {"a": torch.tensor([1.0, 0.0, 0.0], dtype=DOUBLE)}
    net = replace(net, module=nn.Sequential(OrderedDict(a=nn.Linear(4, 3), relu=nn.Tanh(), b=nn.Linear(3, 5))).double())
    local = Local(net, net.initial, {}, {}, draws, {})
    score, batch = (
        StepRule(net, Method(), Optimiser()).make_scorer({}),
        Batch(drawn(2, 4), ((torch.tensor([0, 3]), None),)),
    )
    ntd, fjord = FedNTD(), FjORD()
    narrow = fjord.objective(score, local)(net.initial, batch).loss
    before = ntd.objective(fjord.objective(score, local), local)(net.initial, batch).loss
    behind = fjord.objective(ntd.objective(score, local), local)(net.initial, batch).loss
    assert float(before) == pytest.approx(float(narrow), abs=1e-12) and float(behind - narrow) > 1e-6


# FedDecorr --------------------------------------------------------------------------------------------------------


def ones(rows: int) -> Tensor:
    return torch.ones(rows, dtype=DOUBLE)


def test_decorrelation_by_hand():
    """Standardised columns (-1, 0, 1) and (0, -1, 1): K_12 = K_21 = 1, over three rows."""
    rows = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 2.0]], dtype=DOUBLE)
    batch = Batch(rows, ((torch.tensor([0, 1, 1]), None),))
    added = seen(FedDecorr(0.6), batch, [0]).loss - seen(FedDecorr(0.0), batch, [0]).loss
    assert float(added) == pytest.approx(0.6 / 3, rel=1e-7)


@pytest.mark.parametrize("count, features", [(9, 4), (4, 9), (5, 5)])
def test_decorrelation_against_the_correlation_matrix(count: int, features: int):
    rows = drawn(count, features)
    k = (count - 1) * torch.corrcoef(rows.T)
    squares = k.square().sum() - k.diagonal().square().sum()
    torch.testing.assert_close(sum_squared_correlations(rows, ones(count)), squares / count, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count, features", [(6, 3), (3, 6)])
def test_the_gradient_of_decorrelation_against_finite_differences(count: int, features: int):
    weight = torch.cat((ones(count - 1), torch.zeros(1, dtype=DOUBLE)))
    rows = drawn(count, features).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sum_squared_correlations(x, weight), rows)
    assert not torch.autograd.grad(sum_squared_correlations(rows, weight), rows)[0][-1].any(), "padding is not moved"


def test_padding_is_no_row():
    rows, weight = drawn(7, 3), torch.tensor([1.0, 1, 0, 1, 1, 0, 1], dtype=DOUBLE)
    torch.testing.assert_close(
        sum_squared_correlations(rows, weight), sum_squared_correlations(rows[weight > 0], ones(5))
    )
    text, y = drawn(3, 2, 3), torch.zeros(3, 2, dtype=torch.long)
    padded = Batch(text, ((y, None),), torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE))
    short = Batch(text[:2].reshape(4, 3), ((y[:2].flatten(), None),))
    torch.testing.assert_close(seen(FedDecorr(), padded, [0]).loss, seen(FedDecorr(), short, [0]).loss)


@pytest.mark.parametrize(
    "rows", [drawn(1, 3), drawn(4, 1), torch.ones(4, 3, dtype=DOUBLE)], ids=["a row", "a column", "all alike"]
)
def test_what_cannot_be_correlated_is_not(rows: Tensor):
    rows.requires_grad_()
    found = sum_squared_correlations(rows, ones(len(rows)))
    assert float(found.detach()) == pytest.approx(0, abs=1e-12)
    assert float(torch.autograd.grad(found, rows)[0].abs().max()) == pytest.approx(0, abs=1e-9)


def test_a_model_without_a_linear_layer_is_refused():
    net = Net(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4), 3)
    loop, tiny = build_tiny_run(Method())
    round = replace(visits_round(loop, tiny), net=net, anchor=net.initial)
    with pytest.raises(ShoalError, match="feddecorr looks at what the last linear layer reads"):
        FedDecorr().init_server(round)
    with pytest.raises(ShoalError, match="fedrod works on the last linear layer"):
        FedROD().model(net)


def visits_round(loop, net: Net):
    return loop.open_round(loop.start(net), 0).round


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_masked_and_cut_out_models_train_alike(part: Part):
    """Units that a device does not hold are no features: they are neither counted nor read."""
    loop, net = build_tiny_run(compose([part, FedDrop(0.3)]), (8, 6, 7))
    site, changed = loop.host.setup, 0.0
    for visit in prepare_local_trainings(loop, loop.start(net)):
        plan, slicer = visit.job.plan, site.net.slicer
        small = StepRule(site.net.cut(plan), loop.method, site.optimiser)
        masked, sliced = visit.state, LocalState(*(slicer.cut_tree(field, plan) for field in visit.state))
        own = replace(visit.device, net=small.net, plan=WHOLE_MODEL)
        _, state = part.begin(slicer.take(visit.context.anchor, plan), {}, own)
        sliced = sliced._replace(states=sliced.states | {part.name(): state})
        for rows, scene in zip(visit.rows, make_step_contexts(loop.method, visit)):
            batch = visit.device.samples.take_batch(rows)
            masked, _ = advance(site.rule, masked, batch, scene, compute_autograd_gradient)
            cut = StepContext(*(slicer.cut_tree(field, plan) for field in scene))._replace(mask={})
            sliced, _ = advance(small, sliced, batch, cut, compute_autograd_gradient)
        assert_trees_close(
            slicer.take(masked.params, plan), sliced.params, 1e-9, f"{part}: masked and sliced models part ways"
        )
        changed += float(tree.collect_tensors(tree.subtract_params(masked.params, visit.state.params))[0].abs().sum())
    assert changed > 0


# FedROD -----------------------------------------------------------------------------------------------------------


def test_the_generic_model_is_that_of_balanced_softmax():
    ends = []
    for part in (FedROD(), BalancedSoftmax()):
        loop, net = build_tiny_run(Method((part,)), (5, 3), momentum=0.5)
        ends.append(play_rounds(loop, loop.start(net), 0, 3)[0].params)
    own, expected = ends
    assert all(torch.equal(own[k], v) for k, v in expected.items())
    assert not own["rod.weight"].any() and not own["rod.bias"].any(), "the server knows no head"


def test_a_head_stays_on_its_device_and_goes_on_from_there():
    loop, net = build_tiny_run(Method((FedROD(),)), (5, 3))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    first = [loop.host.memory.get(d)[PERSONAL_KEY] for d in (0, 1)]
    assert set(first[0]) == {"rod.weight", "rod.bias"}
    assert first[0]["rod.bias"].any() and not torch.equal(first[0]["rod.bias"], first[1]["rod.bias"])
    site = loop.host.setup
    job = loop.open_round(standing, 1).jobs[0]
    assert torch.equal(
        prepare_training(site, job, loop.host.memory.get(0)).state.params["rod.bias"], first[0]["rod.bias"]
    )


def test_nothing_more_travels_than_with_fedavg():
    setting: dict[str, Any] = {"rounds": 2, "devices": 4, "sample": 4, "engine": "serial"}
    told = [shoal.run(method=m, **setting).history.rows for m in ("fedavg", "fedrod")]
    for key in ("bytes_up", "bytes_down"):
        assert [row[key] for row in told[0]] == [row[key] for row in told[1]]


def test_the_head_moves_by_cross_entropy_of_the_sum_and_the_model_does_not_feel_it():
    f, y, labels = drawn(4, 3), torch.tensor([0, 2, 2, 1]), [0, 0, 1, 2]
    start = {"rod.weight": drawn(3, 3, seed=1), "rod.bias": drawn(3, seed=2)}
    leaves = {k: v.clone().requires_grad_() for k, v in (straight(3).initial | start).items()}
    loss = seen(FedROD(), Batch(f, ((y, None),)), labels, leaves).loss
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    both = f + f @ start["rod.weight"].T + start["rod.bias"]
    off = (both.softmax(-1) - nn.functional.one_hot(y, 3)) / 4
    torch.testing.assert_close(grads["rod.bias"], off.sum(0))
    torch.testing.assert_close(grads["rod.weight"], off.T @ f)
    prior = torch.tensor([0.5, 0.25, 0.25], dtype=DOUBLE)
    generic = ((f + prior.log()).softmax(-1) - nn.functional.one_hot(y, 3)) / 4
    torch.testing.assert_close(grads["fc.bias"], generic.sum(0))
    expected = compute_cross_entropy(f + prior.log(), y).mean()  # what is told is the loss of the shared model
    torch.testing.assert_close(loss.detach(), expected)


def test_blends_and_positions_reach_the_head():
    f, a, b = drawn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 1, 0])
    head = {"rod.weight": drawn(3, 3, seed=1), "rod.bias": drawn(3, seed=2)}
    alone = [seen(FedROD(), Batch(f, ((y, None),)), [0, 1, 2, 2], head).loss for y in (a, b)]
    mixed = seen(FedROD(), blended(f, a, b, 0.3), [0, 1, 2, 2], head).loss
    torch.testing.assert_close(mixed, 0.3 * alone[0] + 0.7 * alone[1])
    text = Batch(f.view(2, 2, 3), ((a.view(2, 2), None),))
    torch.testing.assert_close(seen(FedROD(), text, [0, 1, 2, 2], head).loss, alone[0])


def test_the_head_learns_what_its_device_has():
    """On devices of few classes, the sum of both is right more often than the generic model alone."""
    assembly = assemble_run(Recipe().with_values(method="fedrod", devices=4, sample=4, split="dirichlet:0.1", rounds=8))
    loop, memory = assembly.loop, assembly.memory
    standing, _ = play_rounds(loop, loop.start(assembly.net), 0, 8)
    right = torch.zeros(2)
    for device in range(4):
        batch = loop.host.setup.samples(device).take_all()
        logits, features, _, _ = assembly.net.forward(standing.params, batch.inputs)
        own = memory.get(device)[PERSONAL_KEY]
        both = logits + nn.functional.linear(features, own["rod.weight"], own["rod.bias"])
        right += torch.stack([(x.argmax(-1) == batch.targets[0][0]).sum() for x in (logits, both)])
    assert right[1] > right[0] + 20


class Pooled(nn.Module):
    """Logits for every row of an image, and then their mean: the last layer does not make the logits."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(len(x), 8, 8)).mean(1)


def test_a_model_that_goes_on_behind_its_last_layer_is_refused():
    model = shoal.hand_over_objects({"model": Pooled()})["model"]
    with pytest.raises(ShoalError, match="fedrod adds logits of shape"):
        shoal.run(method="fedrod", model=model, rounds=1, devices=4, sample=2, engine="serial")


# engines and compositions -----------------------------------------------------------------------------------------
SMALL: dict[str, Any] = {"devices": 6, "sample": 4, "rounds": 2, "precision": "float64", "split": "dirichlet:0.3"}


def ends(crew: Engine, **recipe: Any) -> list[Any]:
    """Everything after two rounds with this crew, and what devices keep."""
    assembly = assemble_run(Recipe().with_values(**SMALL | recipe))
    loop = assembly.loop
    loop.host.engine = crew
    standing, _ = play_rounds(loop, loop.start(assembly.net), 0, 2)
    return [standing.params, [assembly.memory.get(d) for d in range(6)]]


def agrees(caplog, **recipe: Any) -> None:
    """Side by side the same numbers come out as one by one, and nothing falls back."""
    crew = BatchedEngine(3)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        found = ends(crew, **recipe)
    assert not crew.unvectorisable and not caplog.records
    assert_trees_close(found, ends(SerialEngine(), **recipe), 1e-9, f"{recipe}: other numbers side by side")


class Normed(nn.Module):
    """Batch norm and dropout before the features."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop, self.fc = (
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.Dropout(0.3),
            nn.Linear(36, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.norm(self.conv(x)).relu().flatten(1)))


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_they_train_side_by_side_with_padding_and_layers_that_mix_or_draw(part: Part, caplog):
    torch.manual_seed(0)
    model = shoal.hand_over_objects({"model": Normed()})["model"]
    agrees(caplog, method=str(part), model=model, batch=8, momentum=0.5)


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_they_train_language_models(part: Part, caplog):
    text = torch.randint(0, 11, (60, 4), generator=torch.Generator().manual_seed(0))
    data = shoal.hand_over_objects({"data": (text[:, :-1].contiguous(), text[:, 1:].contiguous())})["data"]
    agrees(caplog, method=str(part), data=data, model="lstm", split="iid", steps="1", batch=3, sample=2)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fedlc+fjord", "fedntd+fjord", "feddecorr+fjord", "fedrod+feddrop+dgc"])
def test_compositions_train_side_by_side(method: str, caplog):
    agrees(caplog, method=method, batch=16)


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fedlc+fjord", "fedntd+fjord", "fedrod+feddrop+dgc(ratio=0.1)", "feddecorr+fedlc"])
def test_compositions_learn(method: str):
    rows = shoal.run(method=method, rounds=8, devices=8, sample=8, engine="batched", split="dirichlet:0.5").history.rows
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.1


def test_runs_that_differ_in_numbers_share_a_batch():
    methods = [f"{name}={value})" for name in ("fedlc(tau", "fedntd(tau", "fedntd(beta") for value in (0.3, 2.0)]
    methods += ["feddecorr(beta=0.1)", "feddecorr(beta=1.0)", "balanced_softmax(strength=0.2)", "balanced_softmax"]
    both, apart = (shoal.compare(methods, engine=engine, **SMALL) for engine in ("batched", "serial"))
    for name, found in both.results.items():
        for row, other in zip(found[0].history.rows, apart.results[name][0].history.rows, strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], abs=1e-9)
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-9)


def test_the_second_pass_of_fedntd_is_counted():
    net = mlp((64,), 10)
    rows = [
        shoal.run(method=m, rounds=1, devices=4, sample=4, engine="serial").history.rows[0]
        for m in ("fedavg", "fedntd")
    ]
    assert rows[0]["macs_forward"] == rows[1]["macs_forward"] == net.macs_forward
    assert rows[1]["macs_work"] > 1.2 * rows[0]["macs_work"]
