"""Parts that train sub-models: which units are kept, what they count for, what travels, what becomes of the rest."""

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from shoal.core.batch import Batch, BatchScore
from shoal.core.compose import Method, compose
from shoal.core.local.step import StepContext, StepRule, advance, compute_autograd_gradient
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.part import Part
from shoal.core.server_state import EnrolmentRegister
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Local, Optimiser, Outcome, Reply, Round, Work
from shoal.fleet.fleets import UniformFleet
from shoal.fleet.profile import DeviceProfile
from shoal.models.lenet import lenet
from shoal.models.lstm import lstm
from shoal.models.mlp import mlp
from shoal.models.resnet import build_resnet
from shoal.parts.afd import AFD, compute_unit_chances
from shoal.parts.feddrop import FedDrop
from shoal.parts.feddyn import FedDyn
from shoal.parts.fedmp import FedMP, compute_loss_fall, keep_strongest_units
from shoal.parts.fedprox import FedProx
from shoal.parts.fjord import FjORD, compute_teacher_loss
from shoal.parts.heterofl import HeteroFL, find_class_rows
from shoal.parts.lib.device_seconds import estimate_reply_seconds
from shoal.parts.lib.submodel_units import (
    compute_unit_strengths,
    count_units_at_width,
    count_units_left,
    draw_tier,
    is_batch_normalised,
    is_recurrent,
    parse_levels,
    take_first_units,
)
from shoal.parts.scaffold import Scaffold
from shoal.parts.server_momentum import FedAvgM
from shoal.plugins.smoke_run import build_tiny_net, build_tiny_run, prepare_local_trainings
from shoal.testing.laws import check_pair
from shoal.testing.rounds import play_rounds

PARTS: list[Part] = [FedDrop(), FjORD(), HeteroFL(), AFD(), FedMP()]


def round_of(net: Net, number: int = 0, devices=(0, 1, 2), seed: int = 0) -> Round:
    """A round about to be planned."""
    return Round(
        number,
        net,
        net.initial,
        np.full(64, 5),
        len(devices),
        RandomStreams(seed),
        EnrolmentRegister({}, lambda asked: {}),
        Work(1.0, 0, 2, 0.1),
        Optimiser(),
        UniformFleet(),
        devices=devices,
    )


def planned(part: Part, round: Round, state=None) -> tuple[dict[int, Plan], dict]:
    plans, state = part.plan({d: WHOLE_MODEL for d in round.devices}, state or part.init_server(round), round)
    return dict(plans), state


def answered(round: Round, plans: dict[int, Plan], part: str, **reports: dict[int, float]) -> Round:
    """The same round with replies that report these numbers."""
    (what, told), *_ = reports.items()
    replies = [
        Reply(d, 1, {}, {}, {part: {what: torch.tensor(v)}}, Outcome(d), plans[d], round.anchor, round.number)
        for d, v in told.items()
    ]
    return replace(round, plans=plans, replies=replies)


def local_of(net: Net, state=None, draws: dict[str, Tensor] | None = None) -> Local:
    return Local(net, net.initial, {}, {}, draws or {}, state or {})


INPUTS = torch.tensor([[1.0, -1.0, 0.5, 2.0], [0.0, 1.0, 1.0, -0.5]], dtype=torch.float64)
BATCH = Batch(INPUTS, ((torch.tensor([0, 1]), None),))


def seen(part: Part, net: Net, state=None, draws: dict[str, Tensor] | None = None) -> BatchScore:
    """The score of a batch as a part's objective sees it, from the first parameters."""
    score = StepRule(net, Method(), Optimiser()).make_scorer({})
    return part.objective(score, local_of(net, state, draws))(net.initial, BATCH)


def thrice(net: Net) -> dict[str, Tensor]:
    """The tiny net, in which what its units make counts three times."""
    return net.initial | {"b.weight": 3 * net.initial["b.weight"]}


# the laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_they_go_with_what_else_devices_and_server_do(part: Part):
    for other in (FedProx(1.0), Scaffold(), FedDyn(0.1), FedAvgM()):
        check_pair(part, other)
        check_pair(other, part)


@pytest.mark.parametrize("a", PARTS, ids=str)
def test_two_of_them_are_refused(a: Part):
    for b in PARTS:
        if a is not b:
            with pytest.raises(shoal.ShoalError, match="both set which part of the model"):
                compose([a, b])


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedDrop(1.0),
        lambda: FedDrop(float("nan")),
        lambda: AFD(-0.1),
        lambda: FjORD("0.5,half"),
        lambda: FjORD("0.5,1.5"),
        lambda: FjORD("0.5,0.5"),
        lambda: FjORD(""),
        lambda: HeteroFL("0,1"),
        lambda: HeteroFL("nan"),
        lambda: FedMP("0,1"),
        lambda: FedMP(explore=-1.0),
        lambda: FedMP(discount=0.0),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()


# units ------------------------------------------------------------------------------------------------------------


def test_counts_are_exact_and_never_nothing():
    assert [count_units_at_width(size, 0.2) for size in (1, 5, 6, 128)] == [1, 1, 2, 26]
    assert count_units_at_width(100, 0.07) == 7, "0.07 * 100 is a little more than 7 in floating point"
    assert [count_units_left(size, 0.5) for size in (1, 2, 3, 5, 128)] == [1, 1, 1, 3, 64]
    assert count_units_left(4, 0.99) == 1 and count_units_left(4, 0.0) == 4
    assert parse_levels("1,0.2, 0.4") == (0.2, 0.4, 1.0) and parse_levels("a") == parse_levels("1,1") == ()


def test_axes_of_recurrent_and_normalised_layers_are_told_from_the_others():
    words, images = lstm((6,), 50, width=8), build_resnet((3, 8, 8), 4, 4)
    assert [a.name for a in words.axes if is_recurrent(a)] == ["lstm1", "lstm2"]
    assert all(is_batch_normalised(images, a) for a in images.axes) and not any(
        is_batch_normalised(words, a) for a in words.axes
    )


def test_what_makes_a_unit_is_its_strength():
    net = build_tiny_net()
    weight, bias = net.initial["a.weight"], net.initial["a.bias"]
    torch.testing.assert_close(compute_unit_strengths(net, net.initial)["a"], weight.abs().sum(1) + bias.abs())
    # a unit of an LSTM has a row in each of four gates; what reads it does not count
    words = lstm((6,), 50, width=3)
    own = [words.initial[f"lstm1.{key}"].abs().double() for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    rows = torch.stack([t.flatten(1).sum(1) if t.dim() > 1 else t for t in own]).sum(0)
    torch.testing.assert_close(compute_unit_strengths(words, words.initial)["lstm1"], rows.view(4, 3).sum(0))


def test_a_tier_is_for_life_and_every_level_is_met():
    levels = (0.25, 0.5, 1.0)
    own = [draw_tier(RandomStreams(0), "fjord", d, levels) for d in range(60)]
    assert set(own) == set(levels) and own == [draw_tier(RandomStreams(0), "fjord", d, levels) for d in range(60)]
    assert own != [draw_tier(RandomStreams(0), "heterofl", d, levels) for d in range(60)]
    assert draw_tier(RandomStreams(0), "fjord", SERVER, levels) == 1.0


# FedDrop ----------------------------------------------------------------------------------------------------------


def test_feddrop_drops_neurons_and_on_request_filters():
    net = lenet((1, 8, 8), 10)
    plans, _ = planned(FedDrop(0.5), round_of(net))
    assert {name: len(units) for name, units in plans[0].kept.items()} == {"fc1": 60, "fc2": 42}
    plans, _ = planned(FedDrop(0.5, filters=True), round_of(net))
    assert {name: len(units) for name, units in plans[0].kept.items()} == {"conv1": 3, "conv2": 8, "fc1": 60, "fc2": 42}
    assert list(planned(FedDrop(), round_of(lstm((6,), 50, width=8)))[0][0].kept) == ["embed"]


def test_feddrop_draws_anew_for_every_device_and_round_and_for_nobody_else():
    net = mlp((1, 8, 8), 10)
    all_three, _ = planned(FedDrop(), round_of(net))
    alone, _ = planned(FedDrop(), round_of(net, devices=(1,)))
    later, _ = planned(FedDrop(), round_of(net, number=1))
    kept = [plan.kept["fc1"].tolist() for plan in (all_three[1], alone[1], all_three[0], later[1])]
    assert kept[0] == kept[1] and kept[0] != kept[2] and kept[0] != kept[3]
    assert all(units == sorted(set(units)) for units in kept)
    whole, _ = planned(FedDrop(0.0), round_of(net))
    assert whole[0].kept["fc1"].tolist() == list(range(128)), "an axis is listed even when nothing of it is dropped"


def test_feddrop_on_the_mean_makes_what_the_whole_model_makes():
    # 1 of 3 units is kept and counts three times: on the mean over draws each unit counts once
    net, part = build_tiny_net(), FedDrop(0.5)
    x = torch.ones(1, 4, dtype=torch.float64)
    total = torch.zeros(2, dtype=torch.float64)
    for number in range(2000):
        plans, _ = planned(part, round_of(net, number, devices=(0,)))
        slice_of = net.slicer.place(net.slicer.take(net.initial, plans[0]), net.initial, plans[0])
        total += net.forward(net.slicer.scale_unit_outputs(slice_of, {"a": torch.full((3,), 3.0)}), x)[0][0]
    torch.testing.assert_close(total / 2000, net.forward(net.initial, x)[0][0], atol=0.06, rtol=0)


def test_feddrop_scales_by_the_share_that_is_really_kept():
    loop, net = build_tiny_run(Method((FedDrop(0.5),)))
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    assert visit.state.states["feddrop"]["a"].tolist() == [3.0, 3.0, 3.0]
    scored = seen(FedDrop(0.5), net, state={"a": torch.full((3,), 3.0)})
    torch.testing.assert_close(scored.logits, net.forward(thrice(net), INPUTS)[0])


# FjORD ------------------------------------------------------------------------------------------------------------


def test_fjord_models_lie_inside_each_other():
    net, widths = lenet((1, 8, 8), 10), (0.2, 0.4, 0.6, 0.8, 1.0)
    kept = [take_first_units(net, width) for width in widths]
    assert [len(k["conv1"]) for k in kept] == [2, 3, 4, 5, 6]
    for narrow, wide in zip(kept, kept[1:]):
        assert all(wide[name][: len(units)].tolist() == units.tolist() for name, units in narrow.items())
    plans, _ = planned(FjORD(), round_of(net, devices=range(20)))
    sizes = {d: len(p.kept["fc1"]) for d, p in plans.items()}
    assert sizes == {d: count_units_at_width(120, draw_tier(RandomStreams(0), "fjord", d, widths)) for d in range(20)}
    assert all(p.known and p.level and set(p.kept) == {"conv1", "conv2", "fc1", "fc2"} for p in plans.values())
    again, _ = planned(FjORD(), round_of(net, number=7, devices=range(20)))
    assert sizes == {d: len(p.kept["fc1"]) for d, p in again.items()}


def test_fjord_draws_widths_up_to_its_own_by_the_size_of_the_whole():
    # of 7 units a device of width 0.6 holds 5; a mini-batch of width 0.4 has ceil(2.8) = 3, one of 0.2 has 2
    part, levels = FjORD("0.2,0.4,0.6"), (0.2, 0.4, 0.6)
    widest = next(d for d in range(50) if draw_tier(RandomStreams(0), "fjord", d, levels) == 0.6)
    middle = next(d for d in range(50) if draw_tier(RandomStreams(0), "fjord", d, levels) == 0.4)
    loop, net = build_tiny_run(Method((part,)))
    device = prepare_local_trainings(loop, loop.start(net))[0].device_for_part("fjord")
    small = replace(net, axes=(replace(net.axes[0], size=5),))
    generator = torch.Generator().manual_seed(0)
    for own, counts in ((widest, {2, 3, 5}), (middle, {2, 3})):
        seven = replace(device, id=own, net=small, got={"sizes": torch.tensor([7], dtype=torch.int32)})
        masks = [part.draw(generator, seven, step)["a"].tolist() for step in range(60)]
        assert {int(sum(mask)) for mask in masks} == counts
        assert all(mask == sorted(mask, reverse=True) for mask in masks)


def test_a_step_of_fjord_moves_nothing_beyond_its_width_not_even_by_weight_decay():
    net = build_tiny_net()
    rule = StepRule(net, Method((FjORD(),)), Optimiser(weight_decay=0.1))
    mask = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    numbers_now = {"lr": torch.tensor(0.1, dtype=torch.float64)}
    scene = StepContext(net.initial, {}, numbers_now, {"fjord": {"a": mask}}, {})
    course, _ = advance(rule, rule.init_state(net.initial, {"fjord": {}}), BATCH, scene, compute_autograd_gradient)
    moved = {k: course.params[k] != v for k, v in net.initial.items()}
    assert moved["a.weight"][0].all() and not moved["a.weight"][1:].any()
    assert moved["a.bias"].tolist() == [True, False, False]
    assert moved["b.weight"][:, 0].all() and not moved["b.weight"][:, 1:].any()
    assert moved["b.bias"].all()


def test_fjord_distils_from_the_widest():
    net = build_tiny_net()
    mask = {"a": torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)}
    wide, narrow = seen(FedProx(0.0), net), seen(FjORD(), net, draws=mask)
    taught = seen(FjORD(distil=True), net, draws=mask)
    soft, sharp = wide.logits.softmax(-1), narrow.logits.log_softmax(-1)
    torch.testing.assert_close(taught.loss, wide.loss - (soft * sharp).sum(-1).mean())
    words = torch.zeros(2, 5, 4)
    assert float(compute_teacher_loss(words, words, Batch(words, ()))) == pytest.approx(log(4))


# HeteroFL ---------------------------------------------------------------------------------------------------------


def test_heterofl_divides_what_units_make_by_the_rate():
    loop, net = build_tiny_run(Method((HeteroFL("0.5"),)))
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    assert visit.job.plan.kept["a"].tolist() == [0, 1] and visit.job.plan.known and visit.job.plan.level
    assert visit.state.states["heterofl"]["scale"]["a"].tolist() == [2.0, 2.0, 2.0]
    state = {"scale": {"a": torch.full((3,), 3.0)}, "present": torch.tensor([True, True])}
    torch.testing.assert_close(seen(HeteroFL(), net, state=state).logits, net.forward(thrice(net), INPUTS)[0])


def test_heterofl_counts_the_logits_of_absent_classes_as_0():
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    state = {"scale": {}, "present": torch.tensor([True, False, True])}
    batch = Batch(torch.zeros(1, 1), ((torch.tensor([2]), None),))
    inner = lambda params, batch: BatchScore(logits.sum(), logits, logits, {}, {}, {})  # noqa: E731
    scored = HeteroFL().objective(inner, local_of(build_tiny_net(), state))({}, batch)
    assert float(scored.loss.detach()) == pytest.approx(log((exp(1) + exp(0) + exp(3)) / exp(3)))
    scored.loss.backward()
    assert logits.grad is not None and logits.grad[0, 1] == 0 and logits.grad[0, 0] > 0


def test_heterofl_has_a_loss_of_its_own_only_where_it_masks():
    assert HeteroFL().replaces_loss and not HeteroFL(mask_loss=False).replaces_loss


def test_heterofl_keeps_rows_of_absent_classes_at_home():
    # device 1 holds one sample, so one class; only the other device says what becomes of the other class's row
    loop, net = build_tiny_run(Method((HeteroFL("1"),)), (5, 1))
    standing = loop.start(net)
    asked = loop.open_round(standing, 0)
    outcomes = train_jobs(loop.host, asked.jobs_to_train)
    replies, _ = loop.exchange.decode_replies(asked.jobs, outcomes, asked.round, set())
    label = int(loop.host.setup.samples(1).take_all().targets[0][0])
    assert replies[1].covered["b.weight"].all(1).tolist() == [label == 0, label == 1]
    assert replies[1].covered["b.bias"].tolist() == [label == 0, label == 1]
    assert replies[0].covered["b.bias"].all() and replies[0].covered["b.weight"].all()
    # 8 bytes for each of 3 + 1 numbers are saved, a byte for each of 2 tensors says which rows came
    assert outcomes[0].message and outcomes[1].message
    assert outcomes[0].message.nbytes - outcomes[1].message.nbytes == 8 * (3 + 1)
    after, _ = loop.close_round(asked, outcomes, 0.0)
    other = 1 - label
    change = (after.params["b.weight"] - net.initial["b.weight"])[other]
    torch.testing.assert_close(change, replies[0].delta["b.weight"][other])


def test_the_last_layer_is_found_by_its_rows():
    words = lstm((6,), 50, width=8)
    assert find_class_rows(words.initial, words.slicer, 50) == ["fc.weight", "fc.bias"]
    images = lenet((1, 8, 8), 10)
    assert find_class_rows(images.initial, images.slicer, 10) == ["fc3.weight", "fc3.bias"]
    assert find_class_rows(images.initial, images.slicer, 11) == []


def test_heterofl_leaves_units_behind_a_batch_normalisation_alone():
    net = build_resnet((3, 8, 8), 4, 4)
    loop, tiny = build_tiny_run(Method((HeteroFL("0.5"),)))
    device = replace(prepare_local_trainings(loop, loop.start(tiny))[0].device_for_part("heterofl"), net=net)
    _, state = HeteroFL("0.5").begin(net.initial, {}, device)
    assert state["scale"] == {}


# AFD --------------------------------------------------------------------------------------------------------------


def test_afd_keeps_a_sub_model_while_the_loss_falls_and_draws_another_when_it_rises():
    part, net = AFD(0.25), mlp((1, 8, 8), 10)
    state, kept = {}, []
    for number, loss in enumerate((2.0, 1.0, 0.8, 0.9, 0.9)):
        round = round_of(net, number, devices=(3,))
        plans, state = planned(part, round, state)
        assert len(plans[3].kept["fc1"]) == 96
        kept.append(plans[3].kept["fc1"].tolist())
        _, state = part.serve({}, state, answered(round, plans, "afd", loss={3: loss}))
    # the first two times nothing is known; then it fell twice, rose, and stayed
    assert kept[0] != kept[1] == kept[2] == kept[3] != kept[4]
    scores = state["device 3"]["scores"]["fc1"]
    held = torch.zeros(128, dtype=torch.bool).index_fill(0, torch.tensor(kept[3]), True)
    assert scores[held].tolist() == pytest.approx([0.2] * 96) and not scores[~held].any()
    assert state["device 3"]["fell"] is False and state["device 3"]["loss"] == pytest.approx(0.9)


def test_afd_draws_by_scores_and_treats_unknown_units_as_the_mean_of_the_known():
    assert compute_unit_chances(torch.zeros(4)).tolist() == pytest.approx([0.25] * 4)
    assert compute_unit_chances(torch.tensor([0.4, 0.0, 0.2])).tolist() == pytest.approx(
        [0.4 / 0.9, 0.3 / 0.9, 0.2 / 0.9]
    )
    part, net = AFD(0.6), build_tiny_net()
    scores = {"a": torch.tensor([1e6, 1e-6, 1e-6])}
    for number in range(20):
        plans, _ = planned(part, round_of(net, number, devices=(0,)), {"device 0": {"scores": scores, "fell": False}})
        assert plans[0].kept["a"].tolist() == [0]


def test_afd_knows_only_devices_that_took_part_and_leaves_recurrent_layers_alone():
    words = lstm((6,), 50, width=8)
    plans, state = planned(AFD(0.25), round_of(words, devices=(4, 9)))
    assert set(state) == {"device 4", "device 9"} and list(plans[4].kept) == ["embed"]
    assert len(plans[4].kept["embed"]) == 6


def test_what_afd_knows_is_cut_when_the_model_is():
    part, net = AFD(0.25), mlp((1, 8, 8), 10)
    _, state = planned(part, round_of(net, devices=(0,)))
    state["device 0"]["fell"] = True
    plan = Plan({"fc1": torch.arange(64)})
    small, state = net.cut(plan), net.slicer.cut_tree(state, plan)
    assert len(state["device 0"]["scores"]["fc1"]) == len(state["device 0"]["kept"]["fc1"]) == 64
    plans, _ = planned(part, round_of(small, 1, devices=(0,)), state)
    assert len(plans[0].kept["fc1"]) == 48


def test_afd_reports_the_mean_loss_of_its_mini_batches_in_4_bytes():
    loop, net = build_tiny_run(Method((AFD(),)), (4,))
    standing, rows = play_rounds(loop, loop.start(net), 0, 1)
    assert rows[0]["bytes_by"]["up"]["afd"] == 4
    assert standing.states["afd"]["device 0"]["loss"] == pytest.approx(rows[0]["train_loss"], rel=1e-6)


# FedMP ------------------------------------------------------------------------------------------------------------


def test_fedmp_tries_every_arm_first_and_then_the_one_that_pays():
    part, net, state, arms = FedMP("0,0.25,0.5"), mlp((1, 8, 8), 10), {}, []
    for number in range(12):
        round = round_of(net, number, devices=(0,))
        plans, state = planned(part, round, state)
        arms.append(len(plans[0].kept["fc1"]))
        told = answered(round, plans, "fedmp", fall={0: 0.9 if arms[-1] == 96 else 0.1})
        _, state = part.serve({}, state, told)
    assert set(arms[:3]) == {128, 96, 64} and set(arms[3:]) == {96}


def test_fedmp_counts_a_lost_reply_as_no_reward_and_forgets_with_time():
    part, net = FedMP("0.5", discount=0.5), mlp((1, 8, 8), 10)
    round = round_of(net, devices=(0, 1))
    plans, state = planned(part, round)
    _, state = part.serve({}, state, answered(round, plans, "fedmp", fall={0: 0.4}))
    assert state["device 0"]["total"].tolist() == pytest.approx([0.4]) and state["device 1"]["total"].tolist() == [0.0]
    assert state["device 1"]["tried"].tolist() == [1.0]
    _, state = part.serve({}, state, answered(round, plans, "fedmp", fall={0: 0.8}))
    assert state["device 0"]["tried"].tolist() == [1.5]
    assert state["device 0"]["total"].tolist() == pytest.approx([0.5 * 0.4 + 0.8])


def test_fedmp_keeps_the_units_of_the_largest_norms():
    ranks = {"a": torch.tensor([3.0, 1.0, 2.0, 5.0]), "b": torch.tensor([1.0, 1.0, 1.0, 1.0])}
    kept = keep_strongest_units(ranks, 0.5)
    assert kept["a"].tolist() == [0, 3] and kept["b"].tolist() == [0, 1]


def test_fedmp_combines_what_is_missing_with_its_old_value():
    # two devices of equal weight; the second lacks the first element: there half of the first one's change is left
    net = build_tiny_net()
    change = {k: torch.ones_like(v) for k, v in net.initial.items()}
    held = torch.tensor([False, True])
    lacking = change | {"b.bias": change["b.bias"] * held}
    replies = [Reply(0, 1, change, {}, {}, Outcome(0)), Reply(1, 1, lacking, {"b.bias": held}, {}, Outcome(1))]
    round = replace(round_of(net), replies=replies, weights=torch.tensor([0.5, 0.5]))
    params, _ = FedMP().combine(replies, {}, round)
    assert (params["b.bias"] - net.initial["b.bias"]).tolist() == pytest.approx([0.5, 1.0])
    assert (params["a.weight"] - net.initial["a.weight"]).flatten().tolist() == pytest.approx([1.0] * 12)


def test_fedmp_rewards_the_fall_of_the_loss_and_punishes_being_out_of_step():
    assert float(compute_loss_fall({"first": torch.tensor(4.0), "second": torch.tensor(1.0)}, 3)) == pytest.approx(0.5)
    assert float(compute_loss_fall({"first": torch.tensor(4.0), "second": torch.tensor(0.0)}, 1)) == 0.0
    net = mlp((1, 8, 8), 10)
    round = replace(round_of(net, devices=(0, 1)), fleet=TwoSpeeds())
    told = answered(round, {0: WHOLE_MODEL, 1: WHOLE_MODEL}, "fedmp", fall={0: 0.4, 1: 0.4})
    told = replace(told, replies=[replace(r, outcome=Outcome(r.device, macs_work=1000)) for r in told.replies])
    # 1 and 3 seconds: each is half of the mean away from it
    assert [estimate_reply_seconds(r, told) for r in told.replies] == pytest.approx([1.0, 3.0], rel=1e-4)
    assert FedMP().compute_rewards(told) == pytest.approx({0: 0.4 / 1.5, 1: 0.4 / 1.5}, rel=1e-4)


class TwoSpeeds:
    """Links that take no time; 1 second for 1,000 products, or 3."""

    def get_profile(self, device: int, round: int) -> DeviceProfile:
        return DeviceProfile(macs=1000.0 / (1 + 2 * device), down=1e6, up=1e6)

    def get_available_mask(self, round: int):
        return None


# all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [FjORD("0.3"), HeteroFL("0.3"), FedMP("0.7")], ids=str)
def test_units_that_nobody_holds_keep_their_values(part: Part):
    loop, net = build_tiny_run(Method((part,)), momentum=0.5)
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    moved = (standing.params["a.weight"] != net.initial["a.weight"]).any(1)
    assert moved.sum() == 1
    assert ((standing.params["b.weight"] != net.initial["b.weight"]).any(0) == moved).all()


PARAMETERS = {units: 64 * units + units + units * 10 + 10 for units in range(1, 129)}
"""Of a perceptron on digits with so many hidden units."""


@pytest.mark.parametrize("part", [FedDrop(), FjORD(), HeteroFL(mask_loss=False), AFD(), FedMP()], ids=str)
def test_what_travels_and_what_is_computed_is_the_cut_out_model(part: Part):
    result = shoal.run(str(part), data="digits", model="mlp", rounds=1, split="iid", engine="serial")
    (row,), net = result.history.rows, mlp((1, 8, 8), 10)
    plans, _ = planned(part, round_of(net, devices=row["devices"]))
    units = [len(plan.kept["fc1"]) for plan in plans.values()]
    bitmap = 0 if plans[row["devices"][0]].known else 128 // 8
    beside, told = 4 * isinstance(part, FjORD), 4 * isinstance(part, (AFD, FedMP))
    assert row["bytes_down"] == sum(4 * PARAMETERS[u] + bitmap + beside for u in units)
    assert row["bytes_up"] == sum(4 * PARAMETERS[u] + told for u in units)
    forward = [net.cut(plan).macs_forward for plan in plans.values()]
    assert forward == [64 * u + u * 10 for u in units] and row["macs_forward"] == round(sum(forward) / len(forward))


@pytest.mark.parametrize(
    "method",
    ["feddrop", "fjord", "fjord(distil=True)", "heterofl", "afd", "fedmp"]
    + ["scaffold+fjord", "fedprox+feddrop", "heterofl+feddyn"],
)
def test_they_learn(method: str):
    result = shoal.run(method, data="digits", model="mlp", rounds=5, epochs=5, split="iid", engine="serial")
    assert result.history.rows[-1]["accuracy"] > 0.6


@pytest.mark.parametrize("method", ["feddrop(filters=True)", "fjord", "heterofl", "afd", "fedmp"])
def test_engines_agree_on_filters(method: str):
    made = [
        shoal.run(method, data="digits", model="lenet", rounds=2, steps=2, engine=engine, precision="float64")
        for engine in ("serial", "batched")
    ]
    for key in ("bytes_down", "bytes_up", "macs_forward", "macs_work"):
        assert [row[key] for row in made[0].history.rows] == [row[key] for row in made[1].history.rows]
    for name, value in made[0].params.items():
        torch.testing.assert_close(value, made[1].params[name], atol=1e-9, rtol=0)
