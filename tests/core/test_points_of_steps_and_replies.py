"""The points `gradient`, `sift`, `observe` and `personal`: hand-worked on one weight, and seen on tiny parts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from one_weight import one_weight
from tiny_parts import Ahead, HalfWidth, MeanOfAll, OwnModel, Sieve, Smoothed
from torch import nn

from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.core.session import Session, play_round
from shoal.core.types import Optimiser
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.plugins.smoke_run import SmokeSetup, build_tiny_run, make_tiny_setup, smoke_test_part
from shoal.testing.rounds import play_rounds


def test_a_gradient_ahead_on_one_weight():
    """From w = 0 with target 2: the gradient is -2 there and -1 at 0.5 * 2, so a step of 0.1 leads to 0.1."""
    assert one_weight([Ahead(0.5)], [[2]])[0] == pytest.approx([0.1])


def test_what_gradient_hands_on_reaches_step():
    seen = []

    @dataclass(frozen=True)
    class Watch(Part):
        def step(self, update, state, scored, local):
            seen.append((scored.aux["ahead"].item(), sum(float(u.square().sum()) for u in update.values())))
            return update, state

    loop, net = build_tiny_run(compose([Ahead(0.0), Watch()]))
    play_rounds(loop, loop.start(net), 0, 1)
    assert seen and all(told == pytest.approx(norm) for told, norm in seen)


def make_dropout_setup() -> SmokeSetup:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 2)).double()
    return replace(make_tiny_setup(), net=Net(module, (4,), 2))


@dataclass(frozen=True)
class SameTwice(Part):
    """Twice the gradient less the gradient at the same place: with the same draws it is the gradient."""

    def gradient(self, inner, local):
        def compute_twice(scorer, params, batch):
            (first, scored), (second, _) = (inner(scorer, params, batch) for _ in range(2))
            return {k: 2 * g - first[k] for k, g in second.items()}, scored

        return compute_twice


@pytest.mark.parametrize("engine", [SerialEngine(), BatchedEngine(2)])
def test_dropout_draws_the_same_numbers_each_time_the_gradient_is_taken(engine):
    setting, ends = make_dropout_setup(), []
    for parts in ([], [SameTwice()]):
        loop, net = build_tiny_run(Method(tuple(parts)), (4, 4), engine=engine, setting=setting)
        ends.append(play_rounds(loop, loop.start(net), 0, 2)[0].params)
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-12), "the second pass drew other numbers"


def test_replies_can_be_left_out_and_changed_before_they_are_weighed():
    """w = 0, targets 2 and 6, one step of 0.5: updates 1 and 3; the larger one goes, the other one is halved."""
    assert one_weight([Sieve()], [[2], [6]], lr=0.5)[0] == pytest.approx([0.5])


def test_a_round_in_which_all_replies_are_left_out_is_void():
    @dataclass(frozen=True)
    class Nothing(Part):
        def sift(self, replies, state, round):
            return [], state

    loop, net = build_tiny_run(compose([Nothing()]))
    state, rows = play_rounds(loop, loop.start(net), 0, 1)
    assert rows[0]["void"] and tree.is_same_tree(state.params, net.initial)


BROKEN_SIFTS = {
    "no list": lambda replies: None,
    "twice": lambda replies: [replies[0], replies[0]],
    "of a stranger": lambda replies: [replace(replies[0], device=99)],
    "another shape": lambda replies: [replace(replies[0], delta={k: v[:1] for k, v in replies[0].delta.items()})],
}


@pytest.mark.parametrize("fault", BROKEN_SIFTS)
def test_what_sift_returns_is_checked(fault):
    @dataclass(frozen=True)
    class Broken(Part):
        def sift(self, replies, state, round):
            return BROKEN_SIFTS[fault](replies), state

    loop, net = build_tiny_run(compose([Broken()]))
    with pytest.raises(ShoalError, match="broken breaks a rule at sift"):
        play_rounds(loop, loop.start(net), 0, 1)


def test_an_average_observes_every_round_whether_it_is_evaluated_or_not():
    for evaluates in (True, False):
        loop, net = build_tiny_run(compose([MeanOfAll()]))
        session, models = Session(replace(loop, evaluates=lambda row: evaluates), net), []
        for _ in range(3):
            play_round(session)
            assert session.server_state
            models.append(session.server_state.params)
        assert session.server_state
        mean = {k: torch.stack([m[k] for m in models]).mean(0) for k in net.initial}
        for name, value in loop.make_final_params(session.server_state, 3).items():
            assert torch.allclose(value, mean[name], atol=1e-12)


def test_an_average_sees_what_the_parts_before_it_would_judge():
    judged: dict[str, list] = {}
    for order in ([Smoothed(), MeanOfAll()], [MeanOfAll()]):
        loop, net = build_tiny_run(compose(order))
        state, _ = play_rounds(loop, loop.start(net), 0, 2)
        judged[str(len(order))] = [state.params, state.states["meanofall"]["sum"]]
    (after, smoothed), (same, plain) = judged["2"], judged["1"]
    assert tree.is_same_tree(after, same)
    # the sum of (w0 + w1) / 2 and (w1 + w2) / 2 lies (w2 - w0) / 2 below that of w1 and w2
    for name, value in smoothed.items():
        assert torch.allclose(plain[name] - value, (after[name] - net.initial[name]) / 2, atol=1e-12)


def test_a_device_makes_its_own_model_of_what_it_remembers():
    loop, net = build_tiny_run(compose([OwnModel()]))
    state, _ = play_rounds(loop, loop.start(net), 0, 1)
    own = loop.host.make_personal_model(0, state.params, 1)
    trained = loop.host.memory.get(0)["ownmodel"]["trained"]
    assert all(torch.equal(own[k], (state.params[k] + trained[k]) / 2) for k in own)
    loop, net = build_tiny_run(compose([OwnModel()]))
    assert tree.is_same_tree(loop.host.make_personal_model(1, net.initial, 0), net.initial)


@dataclass(frozen=True)
class OwnGradient(Part):
    """A gradient of zeros, whatever the loss says."""

    replaces_gradient: ClassVar = True

    def gradient(self, inner, local):
        def compute_zeros(scorer, params, batch):
            gradient, scored = inner(scorer, params, batch)
            return {k: torch.zeros_like(g) for k, g in gradient.items()}, scored

        return compute_zeros


@dataclass(frozen=True)
class Doubled(Part):
    def gradient(self, inner, local):
        def compute_double(scorer, params, batch):
            gradient, scored = inner(scorer, params, batch)
            return {k: 2 * g for k, g in gradient.items()}, scored

        return compute_double


def test_the_part_that_replaces_the_gradient_is_innermost():
    for order in ([OwnGradient(), Doubled()], [Doubled(), OwnGradient()]):
        assert [p.name() for p in compose(order).parts_at("gradient")] == ["doubled", "owngradient"]


def refused(*parts: Part) -> str:
    with pytest.raises(ShoalError) as error:
        compose(parts)
    return str(error.value)


@dataclass(frozen=True)
class Whole(Part):
    needs_whole: ClassVar = True


def test_clashes_are_refused():
    assert "where the gradient is taken" in refused(Ahead(), OwnGradient())
    assert "cover the whole model" in refused(Whole(), HalfWidth())


BROKEN_GRADIENTS: dict[str, Any] = {
    "one value": lambda gradient, scored: gradient,
    "no score": lambda gradient, scored: (gradient, 1.0),
    "a name less": lambda gradient, scored: (dict(list(gradient.items())[1:]), scored),
}


@pytest.mark.parametrize("fault", BROKEN_GRADIENTS)
def test_a_broken_gradient_is_told_in_one_sentence(fault):
    with pytest.raises(ShoalError, match="breaks a rule at gradient"):
        smoke_test_part(BrokenGradient(fault))


@dataclass(frozen=True)
class BrokenGradient(Part):
    fault: str = ""

    def gradient(self, inner, local):
        return lambda scorer, params, batch: BROKEN_GRADIENTS[self.fault](*inner(scorer, params, batch))


@dataclass(frozen=True)
class Shadow(Part):
    gradient: str = "own"  # pyright: ignore


def test_a_field_with_the_name_of_a_point_is_refused():
    assert "field gradient" in refused(Shadow())


@pytest.mark.parametrize("engine", [SerialEngine(), BatchedEngine(2)])
def test_micro_batches_draw_dropout_of_their_own_and_the_same_ones_again(engine):
    setting, ends = make_dropout_setup(), []
    for parts in ([], [SameTwice()]):
        loop, net = build_tiny_run(Method(tuple(parts)), (4, 4), engine=engine, setting=setting)
        loop.host.setup = replace(loop.host.setup, optimiser=Optimiser(micro_batch=1))
        ends.append(play_rounds(loop, loop.start(net), 0, 2)[0].params)
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-12)
