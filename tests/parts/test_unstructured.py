"""Parts that prune single weights: which are kept, what travels, and that what is dropped stays at 0."""

import logging
from dataclasses import replace
from math import cos, pi

import numpy as np
import pytest
import torch
from tiny_parts import CutOnce, ServerJoins
from torch import Tensor, nn

import shoal
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.expression import parse_method
from shoal.core.local.step import advance, compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.part import Part
from shoal.core.round import Loop
from shoal.core.server_state import EnrolmentRegister, ServerState
from shoal.core.types import SERVER, Outcome, Reply, Round
from shoal.core.wire import Message, pack_bits, unpack_bits
from shoal.engines.batched.engine import BatchedEngine
from shoal.fleet.fleets import UniformFleet
from shoal.fleet.profile import DeviceProfile
from shoal.models.lenet import lenet
from shoal.models.mlp import mlp
from shoal.models.resnet import build_resnet
from shoal.parts import PRESETS, find_shipped_parts
from shoal.parts.feddst import FedDST, find_pruned_elements, readjust_mask
from shoal.parts.imc import IMC
from shoal.parts.lib.curvature import FlatLoss, estimate_pruning_rate
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.lib.weight_masks import (
    apply_masks,
    compute_erk_counts,
    init_mask_state,
    list_prunable_weights,
    mask_strongest,
    mask_strongest_overall,
    mask_top_elements,
    note_known_masks,
    plan_masked_training,
    replace_masks,
)
from shoal.parts.prunefl import PruneFL, count_worthwhile, measure_round_seconds
from shoal.plugins.smoke_run import build_tiny_net, build_tiny_run, make_step_contexts, prepare_local_trainings
from shoal.testing.hosts import RecordingHost
from shoal.testing.rounds import play_rounds

PARTS: list[Part] = [IMC(), PruneFL(), FedDST()]
BUSY: list[Part] = [
    IMC("fixed", 0.5, at=1),
    PruneFL(0.4, every=1, change=0.4),
    PruneFL(0.6, every=2, most=0.4),
    FedDST(0.5, alpha=0.4, every=1),
    FedDST(0.7, alpha=1.0, every=2, until=4),
]
"""Such that something happens in a few rounds of the tiny run."""


def round_of(net: Net | None = None) -> Round:
    """The first round of a tiny run, about to be planned."""
    loop, tiny = build_tiny_run(Method(), (5, 3, 1, 4))
    net = net or tiny
    return loop.make_round(ServerState(net, net.initial, {}), 0, EnrolmentRegister({}, lambda devices: {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: IMC(rate=1.0),
        lambda: IMC(rule="magnitude"),
        lambda: IMC(at=0),
        lambda: IMC(steps=10**9),
        lambda: PruneFL(rate=1.0),
        lambda: PruneFL(change=1.0),
        lambda: PruneFL(most=0.0),
        lambda: PruneFL(every=10**9),
        lambda: PruneFL(half_life=0),
        lambda: FedDST(sparsity=1.0),
        lambda: FedDST(alpha=1.5),
        lambda: FedDST(alpha=float("nan")),
        lambda: FedDST(every=0),
        lambda: FedDST(until=10**9),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_model_without_matrices_is_refused(part: Part):
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return torch.stack((x @ self.w, -x @ self.w), 1)

    with pytest.raises(ShoalError, match="has none"):
        part.init_server(round_of(Net(Vector(), (4,), 2)))


# which elements are kept ----------------------------------------------------------------------------------------------


def test_the_highest_scores_win_and_of_equal_ones_the_first():
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 3.0, 0.0]])
    assert mask_top_elements(2, scores).tolist() == [[False, True, True], [False, False, False]]
    votes = torch.tensor([[0.0, 1.0, 2.0], [9.0, 5.0, 9.0]])
    assert mask_top_elements(2, scores, votes).tolist() == [[False, False, True], [False, True, False]]
    assert not mask_top_elements(0, scores).any() and mask_top_elements(9, scores).all()


def test_strongest_of_each_and_of_all():
    params = {"a": torch.tensor([[5.0, -4.0], [3.0, 0.1]]), "b": torch.tensor([[0.2, -0.3]])}
    each = mask_strongest(params, {"a": 2, "b": 1})
    assert each["a"].tolist() == [[True, True], [False, False]] and each["b"].tolist() == [[False, True]]
    both = mask_strongest_overall(params, ["a", "b"], 3)
    assert both["a"].tolist() == [[True, True], [False, False]] and both["b"].tolist() == [[False, True]]
    assert mask_strongest_overall(params, ["a", "b"], 0)["b"].tolist() == [[False, True]], "one of each stays"
    assert apply_masks(params, both)["a"].tolist() == [[5.0, -4.0], [0.0, 0.0]], "the rest is 0"


def test_only_matrices_and_filters_are_pruned():
    net = build_resnet((3, 8, 8), 4, 4)
    found = list_prunable_weights(FedDST(), net)
    assert all(net.initial[k].dim() in (2, 4) for k in found)
    assert {k for k in net.trainable if net.initial[k].dim() > 1} == set(found)


def test_erk_by_hand():
    """9 of 18 elements, by the sides 3 + 4 and 2 + 3: 9 / 12 of each side, 5.25 and 3.75, which are 5 and 4."""
    shapes = {"a": torch.Size((3, 4)), "b": torch.Size((2, 3))}
    assert compute_erk_counts(shapes, 0.5) == {"a": 5, "b": 4}
    assert compute_erk_counts(shapes, 0.1) == {"a": 10, "b": 6}, (
        "16 x 5 / 12 is more than 6: the rest goes to the other"
    )
    assert compute_erk_counts(shapes, 0.0) == {"a": 12, "b": 6}
    assert compute_erk_counts(shapes, 0.99) == {"a": 1, "b": 1}


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.8, 0.9, 0.99])
def test_erk_keeps_the_wanted_total(sparsity: float):
    for net in (lenet((3, 32, 32), 10), mlp((1, 8, 8), 10), build_resnet((3, 8, 8), 4, 4)):
        shapes = {k: net.initial[k].shape for k in list_prunable_weights(FedDST(), net)}
        counts, total = compute_erk_counts(shapes, sparsity), sum(shape.numel() for shape in shapes.values())
        assert sum(counts.values()) == total - round(sparsity * total)
        assert all(1 <= count <= shapes[k].numel() for k, count in counts.items())


def test_erk_makes_small_layers_dense():
    """LeNet at 0.8: 12,354 weights over sides of 869; the last layer would get 1,336 of its 840, the others share."""
    shapes = {k: v.shape for k, v in lenet((3, 32, 32), 10).initial.items() if v.dim() > 1}
    counts = list(compute_erk_counts(shapes, 0.8).values())
    scale = (12354 - 840) / (869 - 94)
    assert counts[-1] == 840
    for count, shape in zip(counts[:-1], shapes.values()):
        assert abs(count - scale * sum(shape)) < 1


# who is told ----------------------------------------------------------------------------------------------------------


def test_masks_travel_to_those_who_do_not_know_them():
    round, mask = round_of(), torch.eye(3, 4, dtype=torch.bool)
    state = init_mask_state({"a.weight": mask}, round)
    plans = plan_masked_training({d: WHOLE_MODEL for d in (0, 1, 2, SERVER)}, state)
    assert [plans[d].known for d in (0, 1, 2, SERVER)] == [False, False, False, True]
    answered = [Reply(d, 1, {}, {}, {}, Outcome(d)) for d in (1, SERVER)]
    state = note_known_masks(state, replace(round, replies=answered))
    assert [plan_masked_training({d: WHOLE_MODEL}, state)[d].known for d in (0, 1, 3)] == [False, True, False], (
        "0 may have missed it"
    )
    assert replace_masks(state, {"a.weight": mask.clone()}) is state, "the same masks are no news"
    state = replace_masks(state, {"a.weight": ~mask})
    assert not plan_masked_training({1: WHOLE_MODEL}, state)[1].known
    state = replace_masks(state, {"a.weight": torch.ones_like(mask)})
    assert plan_masked_training({1: WHOLE_MODEL}, state)[1] is WHOLE_MODEL and not state["masks"], (
        "nothing left out is no mask at all"
    )


KEPT = 9472 - round(0.5 * 9472) + 138
"""Of the weights of the mlp on digits half, and all its biases."""
BITS = 9472 // 8


def expected(history, first: int, kept: int = KEPT) -> list[int]:
    """The bytes down of each round: 4 for each value, and a bit for each weight to devices that are met with masks."""
    made, met = [], set()
    for row in history.rows:
        if row["round"] < first:
            made.append(4 * 9610 * len(row["devices"]))
            continue
        made.append(4 * kept * len(row["devices"]) + BITS * len(set(row["devices"]) - met))
        met |= set(row["devices"])
    return made


RUN = {"data": "digits", "model": "mlp", "split": "iid", "steps": 2, "engine": "serial", "devices": 8}


def test_bytes_of_imc():
    rows = shoal.run("imc(rule='fixed', rate=0.5, at=2)", rounds=6, **RUN).history
    assert [row["bytes_down"] for row in rows.rows] == expected(rows, 2)
    assert [row["bytes_up"] // len(row["devices"]) for row in rows.rows] == [4 * 9610] * 2 + [4 * KEPT] * 4
    assert {row["macs_forward"] for row in rows.rows} == {mlp((1, 8, 8), 10).macs_forward}


def test_bytes_of_prunefl():
    rows = shoal.run("prunefl(every=4)", rounds=4, **RUN).history
    down, devices = expected(rows, 0), len(rows.rows[-1]["devices"])
    assert [row["bytes_down"] for row in rows.rows] == [*down[:3], down[3] + devices], "a byte to ask"
    assert [row["bytes_up"] // devices for row in rows.rows] == [4 * KEPT] * 3 + [4 * KEPT + 4 * 9610]
    work = [row["macs_work"] for row in rows.rows]
    assert work[0] == work[1] == work[2] < work[3], "and a pass over the samples"


def test_bytes_of_feddst():
    """Both layers keep less than all, so both have masks; what is exchanged costs bits and spares values."""
    part = FedDST(0.5, alpha=0.1, every=4, until=8)
    rows = shoal.run(str(part), rounds=4, **RUN).history
    counts = compute_erk_counts({"fc1": torch.Size((128, 64)), "fc2": torch.Size((10, 128))}, 0.5)
    assert counts == {"fc1": 3456, "fc2": 1280}, "the second layer is dense"
    down, devices = expected(rows, 0), len(rows.rows[-1]["devices"])
    down = [own - (own - 4 * KEPT * devices) // BITS * (1280 // 8) for own in down]
    assert [row["bytes_down"] for row in rows.rows] == [*down[:3], down[3] + devices]
    gone = round(0.1 / 2 * (1 + cos(pi / 2)) * 3456)
    assert gone == 173
    assert [row["bytes_up"] // devices for row in rows.rows] == [4 * KEPT] * 3 + [4 * (KEPT - gone) + 8192 // 8]


# IMC ------------------------------------------------------------------------------------------------------------------


def test_imc_prunes_at_the_end_of_the_round_it_is_told():
    """Rounds are counted from 1: `at=2` is the second one, number 1 in the history."""
    part = IMC("fixed", 0.4, at=2)
    loop, net = build_tiny_run(Method((part,)))
    first, _ = play_rounds(loop, loop.start(net), 0, 1)
    assert not first.states["imc"]["masks"] and all((v != 0).all() for v in first.params.values())
    plain, plain_net = build_tiny_run(Method(()))
    before, _ = play_rounds(plain, plain.start(plain_net), 0, 2)
    second, _ = play_rounds(loop, first, 1, 2)
    weights = torch.cat([before.params[k].abs().flatten() for k in ("a.weight", "b.weight")])
    threshold = weights.sort().values[round(0.4 * 18)]
    for name, value in before.params.items():
        kept = value.abs() >= threshold if value.dim() > 1 else torch.ones_like(value, dtype=torch.bool)
        assert torch.equal(second.params[name], torch.where(kept, value, 0.0)), "as FedAvg, but for what went"
    assert sum(int((second.params[k] != 0).sum()) for k in ("a.weight", "b.weight")) == 18 - 7
    later, _ = play_rounds(loop, second, 2, 4)
    assert later.states["imc"]["version"] == 1, "once and for all"


def test_imc_finds_its_rate_on_the_samples_of_the_server():
    part = IMC(at=1, images=3, steps=5)
    loop, net = build_tiny_run(Method((part,)))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    plain, plain_net = build_tiny_run(Method(()))
    before, _ = play_rounds(plain, plain.start(plain_net), 0, 1)
    assert loop.server is not None
    batch = loop.server.take_batch(loop.server.index[:3])
    probe = loop.streams.make_torch_generator("part imc probe", 0)
    share = estimate_pruning_rate(
        "slq_plateau", FlatLoss(net, before.params, batch), net.initial, before.params, 5, probe
    )
    assert share is not None and 0 < share <= 0.8
    assert kept_of(standing, "imc") == 18 - round(share * 18)


def test_imc_waits_for_curvature_that_is_finite():
    loop, net = build_tiny_run(Method((IMC(at=1, images=3, steps=5),)))
    asked = loop.open_round(loop.start(net), 0)
    state = loop.start(net).states["imc"]
    broken = {k: v * float("nan") for k, v in net.initial.items()}
    assert not IMC(at=1).serve(broken, state, asked.round)[1]["done"]
    assert IMC(at=1).serve(net.initial, state, asked.round)[1]["done"]


def test_imc_without_samples_needs_a_fixed_rate():
    round = replace(round_of(), server=None)
    with pytest.raises(ShoalError, match="samples of the server"):
        IMC().init_server(round)
    assert not IMC("fixed").init_server(round)["masks"]


# PruneFL --------------------------------------------------------------------------------------------------------------


def test_an_element_is_worth_it_while_it_gains_more_per_second_than_the_model():
    """Three elements that gain 6 in 3 s: 9 > 6 / 3, 4 > 15 / 4, but 1 < 19 / 5; in 103 s also 1 > 19 / 105."""
    gains, whole = torch.tensor([9.0, 4.0, 1.0]), torch.tensor(6.0)
    assert count_worthwhile(gains, whole, 3, 0.0, 1.0) == 2
    assert count_worthwhile(gains, whole, 3, 100.0, 1.0) == 3
    assert count_worthwhile(gains, torch.tensor(60.0), 3, 0.0, 1.0) == 0
    assert count_worthwhile(gains, whole, 3, 1.0, 0.0) == 3, "elements that cost nothing are worth it"
    assert count_worthwhile(gains[:0], whole, 3, 0.0, 1.0) == 0


def test_worth_is_what_a_greedy_search_finds():
    draw = torch.Generator().manual_seed(0)
    for fixed in (0.0, 3.0, 40.0):
        gains = torch.rand(50, generator=draw, dtype=torch.float64).pow(6).sort(descending=True).values
        total, time, taken = 0.7, fixed + 0.5 * 7, 0
        while taken < 50 and gains[taken] / 0.5 > total / time:
            total, time, taken = total + float(gains[taken]), time + 0.5, taken + 1
        assert count_worthwhile(gains, torch.tensor(0.7, dtype=torch.float64), 7, fixed, 0.5) == taken


def test_an_element_costs_its_way_down_and_up():
    fleet = UniformFleet(DeviceProfile(macs=1e6, down=8.0, up=2.0))
    replies = [Reply(0, 1, {}, {}, {}, Outcome(0, macs_work=10**6)), Reply(1, 1, {}, {}, {}, Outcome(1, macs_work=0))]
    server = Reply(SERVER, 1, {}, {}, {}, Outcome(SERVER, macs_work=10**9))
    round = replace(round_of(), fleet=fleet, replies=[*replies, server])
    assert measure_round_seconds(round) == pytest.approx((0.5, 8 * 8e-6 * (1 / 8 + 1 / 2)))


def test_prunefl_by_hand():
    """Half of each matrix at first; a third of those may go, and come back or not by their gradients."""
    net = build_tiny_net()
    part = PruneFL(0.5, every=1, change=0.34)
    values = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4)
    params = net.initial | {"a.weight": values, "b.weight": values[:2, :3]}
    round = replace(round_of(), anchor=params, fleet=UniformFleet(DeviceProfile(macs=1e99, down=1.0, up=1.0)))
    state = part.init_server(round)
    assert state["masks"]["a.weight"].flatten().tolist() == [False] * 6 + [True] * 6
    assert state["masks"]["b.weight"].flatten().tolist() == [False] * 3 + [True] * 3
    assert part.find_non_prunable(values, state["masks"]["a.weight"], 0).flatten().tolist() == [False] * 8 + [True] * 4
    squares = {k: torch.zeros_like(params[k]) for k in net.shared_trainable}
    squares["a.weight"][0, 0] = 8.0
    squares["a.weight"][2, 3] = 16.0
    squares["b.weight"][1, 0] = 3.0
    squares["a.bias"][:] = 1.0
    flat = torch.cat([squares[k].flatten() for k in net.shared_trainable])
    told = Reply(0, 1, {}, {}, {"prunefl": {"squares": flat}}, Outcome(0))
    round = replace(round, replies=[told], weights=torch.ones(1, dtype=torch.float64))
    made, state = part.serve(params, state, round)
    # 5 biases, 4 and 2 weights stay, which gain 19 in 11: 8 > 19 / 11 comes in, then 3 > 27 / 12, and then none
    assert state["masks"]["a.weight"].flatten().tolist() == [True] + [False] * 7 + [True] * 4
    assert state["masks"]["b.weight"].flatten().tolist() == [False] * 3 + [True] * 3
    assert made["a.weight"].flatten().tolist() == [0.0] * 8 + [9.0, 10.0, 11.0, 12.0], "what comes in starts at 0"
    slow, masks = replace(round, fleet=UniformFleet(DeviceProfile(seconds=1e9))), state["masks"]
    for most, kept in ((1.0, 18), (0.5, 9)):
        found = replace(part, most=most).choose_masks(params, masks, flat + 1, slow)
        assert sum(int(mask.sum()) for mask in found.values()) == kept, "where computing takes long, all are worth it"


def test_what_may_go_halves():
    part, values = PruneFL(change=0.8, half_life=10), torch.arange(10.0).view(2, 5)
    assert [int(part.find_non_prunable(values, None, number).sum()) for number in (0, 10, 20, 30)] == [2, 6, 8, 9]


def test_devices_report_the_squares_of_all_gradients():
    loop, net, spy = spied(PruneFL(0.5, every=2))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    assert all(not said(o).beside for o in spy.outcomes[0])
    _, (row,) = play_rounds(loop, standing, 1, 2)
    for device, outcome in enumerate(spy.outcomes[1]):
        slopes = compute_loss_gradient(net, standing.params, loop.host.setup.samples(device))
        wanted = torch.cat([slopes[k].flatten().square() for k in net.shared_trainable])
        torch.testing.assert_close(said(outcome).beside["prunefl"]["squares"], wanted, rtol=0, atol=1e-12)
    assert row["bytes_by"]["up"]["prunefl"] == 2 * 8 * 23


# FedDST ---------------------------------------------------------------------------------------------------------------


def test_the_share_that_is_exchanged_falls_as_half_a_cosine():
    part, mask = FedDST(alpha=0.5, every=10, until=40), torch.arange(1000) < 400
    shares = {10: 0.25 * (1 + cos(pi / 4)), 20: 0.25, 30: 0.25 * (1 - cos(pi / 4))}
    for number in range(60):
        assert part.count_exchanges(mask, number) == round(400 * shares.get(number + 1, 0.0))
    assert replace(part, alpha=1.0).count_exchanges(torch.arange(10) < 9, 9) == 1, "no more than there are others"


def test_a_device_gives_up_its_smallest_weights_for_the_steepest_others():
    part = FedDST(0.5, alpha=0.5, every=1, until=10**6)
    loop, net = build_tiny_run(Method((part,)))
    visit = prepare_local_trainings(loop, loop.start(net))[1]
    device = visit.device_for_part("feddst")
    told = part.measure(visit.device.anchor, {}, device)
    slopes = compute_loss_gradient(net, device.anchor, device.samples)
    for name, mask in device.plan.masks.items():
        count = round(0.5 * int(mask.sum()))
        places = range(mask.numel())
        size, steep, kept = device.anchor[name].flatten().abs(), slopes[name].flatten().abs(), mask.flatten()
        out = sorted((i for i in places if kept[i]), key=lambda i: float(size[i]))[:count]
        into = sorted((i for i in places if not kept[i]), key=lambda i: -float(steep[i]))[:count]
        assert unpack_bits(told[f"exchanged {name}"], kept.shape).nonzero().flatten().tolist() == sorted(out + into)
    assert part.measure(visit.device.anchor, {}, replace(device, got={})) == {}, "only when asked"


def test_an_element_goes_when_all_let_it_go():
    value, mask = torch.tensor([5.0, 0.1, 0.0, 0.0, 3.0]), torch.tensor([True, True, False, False, True])

    def report(*changed: int) -> dict[str, Tensor]:
        return {"exchanged w": pack_bits(torch.zeros(5, dtype=torch.bool).index_fill(0, torch.tensor(changed), True))}

    both = [(0.4, report(1, 2)), (0.6, report(1, 3))]
    assert readjust_mask(value, "w", mask, both).tolist() == [True, False, False, True, True], (
        "in its place what most took"
    )
    one = [(0.4, report(1, 2)), (0.6, {})]
    assert readjust_mask(value, "w", mask, one).tolist() == mask.tolist(), "0.1 is more than 0"


def test_the_server_averages_over_those_who_hold_an_element():
    part = FedDST(0.5, alpha=0.4, every=1)
    loop, net, spy = spied(part)
    standing = loop.start(net)
    after, _ = play_rounds(loop, standing, 0, 1)
    asked = loop.open_round(standing, 0)
    replies, _ = loop.exchange.decode_replies(asked.jobs, spy.outcomes[0], asked.round, set())
    some = 0
    for name, mask in standing.states["feddst"]["masks"].items():
        total = mass = torch.zeros_like(net.initial[name])
        for reply, size in zip(replies, (5, 3)):
            swapped = unpack_bits(reply.report["feddst"][f"exchanged {name}"], mask.shape)
            assert torch.equal(reply.covered[name], mask & ~swapped)
            total = total + size * (net.initial[name] + reply.delta[name]) * reply.covered[name]
            mass = mass + size * reply.covered[name]
        mean = torch.where(mass > 0, total / mass, 0.0)
        new = after.states["feddst"]["masks"][name]
        torch.testing.assert_close(after.params[name], torch.where(new, mean, 0.0), rtol=0, atol=1e-12)
        assert int(new.sum()) == int(mask.sum())
        some += int((mass == 5).sum()) + int((mass == 3).sum())
    assert some, "the devices did not all give up the same"


def test_exchanges_that_do_not_add_up_are_refused():
    mask = torch.tensor([[True, True, False], [False, True, False]])
    plan = Plan(masks={"w": mask})
    swap = torch.tensor([[True, False, False], [False, False, True]])
    assert find_pruned_elements({"exchanged w": pack_bits(swap)}, plan)["w"].tolist() == [True, False, False]
    assert find_pruned_elements({}, plan) == {}
    for damaged in (
        pack_bits(mask),
        pack_bits(torch.ones(9, dtype=torch.bool)),
        pack_bits(swap) | 1,
        torch.zeros(1),
        torch.ones(()),
    ):
        with pytest.raises(ShoalError, match="message"):
            find_pruned_elements({"exchanged w": damaged}, plan)


def test_values_that_do_not_fit_are_refused():
    part = FedDST(0.5, alpha=0.5, every=1)
    loop, net, spy = spied(part)
    standing = loop.start(net)
    play_rounds(loop, standing, 0, 1)
    asked, outcome = loop.open_round(standing, 0), spy.outcomes[0][0]
    short = {k: e | {"value": e["value"][:-1]} if k == "a.weight" else e for k, e in said(outcome).body.items()}
    broken = replace(outcome, message=Message(short, said(outcome).beside))
    _, dropped = loop.exchange.decode_replies(asked.jobs[:1], [broken], asked.round, set())
    assert len(dropped) == 1 and "do not fit" in dropped[0]["why"]


# what is dropped stays dropped ----------------------------------------------------------------------------------------


def spied(part: Part, *others: Part) -> tuple[Loop, Net, RecordingHost]:
    loop, net = build_tiny_run(compose([part, *others]))
    spy = RecordingHost(loop.host)
    return replace(loop, host=spy), net, spy


def said(outcome: Outcome) -> Message:
    assert outcome.message is not None
    return outcome.message


def kept_of(standing: ServerState, name: str) -> int:
    return sum(int(m.sum()) for m in standing.states[name]["masks"].values())


def at_zero(params: dict[str, Tensor], masks: dict[str, Tensor]) -> bool:
    return all(bool((params[k][~mask] == 0).all()) for k, mask in masks.items())


@pytest.mark.parametrize("part", BUSY, ids=str)
def test_what_is_dropped_is_0_on_the_server_and_never_moves_on_devices(part: Part):
    loop, net = build_tiny_run(Method((part,)), momentum=0.5)
    rule = replace(loop.host.setup.rule, optimiser=replace(loop.optimiser, weight_decay=0.1))
    standing, seen = loop.start(net), set()
    for number in range(4):
        masks = standing.states[part.name()]["masks"]
        for visit in prepare_local_trainings(loop, standing, number):
            assert visit.job.plan.masks.keys() == masks.keys() and at_zero(visit.device.anchor, masks)
            course = visit.state
            for rows, scene in zip(visit.rows, make_step_contexts(loop.method, visit)):
                course, _ = advance(
                    rule, course, visit.device.samples.take_batch(rows), scene, compute_autograd_gradient
                )
            assert at_zero(course.params, masks)
            assert all(bool((course.params[k] != visit.device.anchor[k])[m].any()) for k, m in masks.items())
        standing, (row,) = play_rounds(loop, standing, number, number + 1)
        masks = standing.states[part.name()]["masks"]
        assert at_zero(standing.params, masks) and at_zero(loop.make_final_params(standing, number + 1), masks)
        assert all(bool(m.any()) for m in masks.values()) and not row.get("void")
        seen.add(tuple(tuple(m.flatten().tolist()) for m in masks.values()))
        if isinstance(part, FedDST):
            total = sum(net.initial[k].numel() for k in masks)
            assert kept_of(standing, "feddst") + 18 - total == 18 - round(part.sparsity * 18), "sparsity is exact"
        elif isinstance(part, PruneFL):
            assert kept_of(standing, "prunefl") <= max(part.most, 1 - part.rate) * 18
        else:
            assert kept_of(standing, "imc") == 9
    assert isinstance(part, IMC) or len(seen) > 1, "the masks did change"


@pytest.mark.whole
@pytest.mark.parametrize(
    "method",
    [
        "imc(rule='fixed', rate=0.5, at=2)+fedavgm",
        "fedavgm+imc(rule='fixed', rate=0.5, at=2)",
        "imc(rule='fixed', rate=0.5, at=2)+feddyn(alpha=0.1)",
        "prunefl(rate=0.5, every=2)+topk(ratio=0.3)",
        "prunefl(rate=0.5, every=2)+fedadam",
        "feddst(sparsity=0.5, alpha=0.4, every=2)+fedprox(mu=0.1)",
        "feddst(sparsity=0.5, alpha=0.4, every=2)+topk(ratio=0.5)",
        "feddst(sparsity=0.5, alpha=0.4, every=2)+half+scaffold",
    ],
)
def test_compositions(method: str):
    parts = parse_method(method, find_shipped_parts(), PRESETS).parts
    name = next(p.name() for p in parts if p.name() in ("imc", "prunefl", "feddst"))
    ends = []
    for crew in (None, BatchedEngine(3)):
        loop, net = build_tiny_run(compose(parts), (5, 3, 4), momentum=0.5, engine=crew)
        standing = loop.start(net)
        for number in range(5):
            before = standing.states[name]["masks"]
            assert all(at_zero(v.device.anchor, before) for v in prepare_local_trainings(loop, standing, number)), (
                "it was sent"
            )
            standing, (row,) = play_rounds(loop, standing, number, number + 1)
            assert not row.get("void") and not row.get("dropped")
            judged = loop.make_final_params(standing, number + 1)
            assert at_zero(judged, standing.states[name]["masks"]), "it was revived"
            assert parts[-1].name() != name or at_zero(standing.params, standing.states[name]["masks"])
        assert standing.states[name]["masks"]
        ends.append(judged)
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], rtol=0, atol=1e-9)


@pytest.mark.parametrize("part", BUSY, ids=str)
def test_masks_follow_a_model_that_shrinks_and_a_server_that_trains(part: Part):
    loop, net = build_tiny_run(compose([part, CutOnce(1), ServerJoins()]))
    standing, rows = play_rounds(loop, loop.start(net), 0, 4)
    assert tree.is_tree_finite(standing.params) and not any(row.get("void") for row in rows)
    for name, mask in standing.states[part.name()]["masks"].items():
        assert mask.shape == standing.params[name].shape and (standing.params[name][~mask] == 0).all()


@pytest.mark.parametrize(
    "method",
    ["imc(rule='fixed', rate=0.5, at=1)", "prunefl(every=1)", "feddst(alpha=0.2, every=1)"],
)
def test_engines_agree_on_filters_and_nothing_falls_back(method: str, caplog):
    with caplog.at_level(logging.WARNING, logger="shoal"):
        made = [
            shoal.run(method, data="digits", model="lenet", rounds=3, steps=2, engine=engine, precision="float64")
            for engine in ("serial", "batched")
        ]
    assert "one after the other" not in caplog.text
    for key in ("bytes_down", "bytes_up", "macs_forward", "macs_work"):
        assert [row[key] for row in made[0].history.rows] == [row[key] for row in made[1].history.rows]
    for name, value in made[0].params.items():
        torch.testing.assert_close(value, made[1].params[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", ["imc(rule='fixed', rate=0.5, at=2)", "prunefl(every=2)", "feddst(every=2)"])
def test_they_learn(method: str):
    result = shoal.run(method, data="digits", model="mlp", rounds=6, epochs=5, split="iid", engine="serial")
    assert result.history.rows[-1]["accuracy"] > 0.6
    weights = [v for v in result.params.values() if v.dim() > 1]
    assert np.mean([float((v == 0).double().mean()) for v in weights]) > 0.05
