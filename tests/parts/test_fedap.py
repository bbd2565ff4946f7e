"""FedAP and HRank: rates from curvature, a threshold, filters that go, and a model that is really smaller."""

from dataclasses import replace
from math import floor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.core.compose import compose
from shoal.core.expression import parse_method
from shoal.core.measures.divergence import measure_label_degree, measure_label_degrees
from shoal.core.model.flops import count_macs
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.session import train_jobs
from shoal.models import build_model
from shoal.models.lenet import lenet
from shoal.parts import find_shipped_parts
from shoal.parts.fedap import FedAP
from shoal.parts.hrank import HRank
from shoal.parts.lib.filter_choice import choose_kept_filters, compute_layer_rates, list_filter_axes
from shoal.parts.lib.label_counts import compute_known_degrees
from shoal.parts.lib.label_counts import count_labels as labels_of
from shoal.parts.lib.unit_scores import score_neurons
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import play_rounds

SHAPE = (3, 32, 32)


def pruned_by(net: Net, rate: float) -> Plan:
    """What a fixed rate leaves of a net, ranks being those of random images."""
    rates = compute_layer_rates(net, net.initial, rate)
    ranks = score_neurons(net, net.initial, torch.rand(4, *net.input_shape, generator=torch.Generator().manual_seed(0)))
    return Plan(choose_kept_filters(net, net.initial, ranks, rates))


def test_a_threshold_by_hand():
    """23 parameters of the sizes 1 to 23."""
    _, net = build_tiny_run(compose([]))
    params = {k: torch.zeros_like(v) for k, v in net.initial.items()}
    params["a.weight"] = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]).double()
    params["a.bias"] = torch.tensor([13.0, 14.0, 15.0]).double()
    params["b.weight"] = -torch.tensor([[16.0, 17.0, 18.0], [19.0, 20.0, 21.0]]).double()
    params["b.bias"] = torch.tensor([22.0, 23.0]).double()
    assert compute_layer_rates(net, params, 0.0) == {"a": 0.0}
    assert compute_layer_rates(net, params, 0.4) == {"a": pytest.approx(8 / 12)}  # position floor(9.2) is the number 9
    assert compute_layer_rates(net, params, 0.8) == {"a": 1.0}


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.66, 0.99])
def test_filters_of_the_highest_rank_stay(rate):
    net = lenet(SHAPE, 10)
    ranks = {a.name: torch.rand(a.size, generator=torch.Generator().manual_seed(1)) for a in net.axes}
    kept = choose_kept_filters(net, net.initial, ranks, {a.name: rate for a in net.axes})
    for axis in list_filter_axes(net):
        gone = floor(rate * axis.size + 1e-9)
        stays = max(1, axis.size - gone)
        expected = ranks[axis.name].argsort(descending=True)[:stays].sort().values
        assert kept.get(axis.name, torch.arange(axis.size)).tolist() == expected.tolist()
    assert not {"fc1", "fc2"} & set(kept)


def test_of_equal_ranks_the_strongest_filters_stay():
    net = lenet(SHAPE, 10)
    params = dict(net.initial)
    params["conv1.weight"] = params["conv1.weight"] * torch.tensor([1.0, 9.0, 2.0, 8.0, 3.0, 7.0]).view(-1, 1, 1, 1)
    ranks = {a.name: torch.ones(a.size) for a in net.axes}
    assert choose_kept_filters(net, params, ranks, {"conv1": 0.5, "conv2": 0.0})["conv1"].tolist() == [1, 3, 5]


def test_a_bias_does_not_make_a_filter_strong():
    net = lenet(SHAPE, 10)
    params = dict(net.initial)
    params["conv1.weight"] = torch.ones_like(params["conv1.weight"]) * torch.tensor([6.0, 5, 4, 3, 2, 1]).view(
        -1, 1, 1, 1
    )
    params["conv1.bias"] = torch.tensor([0.0, 0, 0, 1e3, 1e3, 1e3])
    ranks = {a.name: torch.ones(a.size) for a in net.axes}
    assert choose_kept_filters(net, params, ranks, {"conv1": 0.5, "conv2": 0.0})["conv1"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("size, stays", [(1, 1), (2, 1), (3, 1)])
def test_the_last_filter_of_a_layer_stays(size, stays):
    net = lenet(SHAPE, 10)
    small = net.cut(Plan({"conv1": torch.arange(size)}))
    ranks = {a.name: torch.ones(a.size) for a in small.axes}
    kept = choose_kept_filters(small, small.initial, ranks, {"conv1": 1.0, "conv2": 0.0}).get(
        "conv1", torch.arange(size)
    )
    assert len(kept) == stays


def test_a_curvature_that_is_not_finite_is_not_counted():
    """The server's here; a device whose own is not finite sends none."""
    part = FedAP(at=1)
    loop, net = build_tiny_run(compose([part]), (6, 3))
    asked = loop.open_round(loop.start(net), 0)
    outcomes = train_jobs(loop.host, asked.jobs_to_train)
    replies, _ = loop.exchange.decode_replies(asked.jobs, outcomes, asked.round, set())
    round = replace(asked.round, replies=replies, params={k: v * float("nan") for k, v in net.initial.items()})
    state = {"labels": {"device 0": torch.tensor([4.0, 2.0]), "device 1": torch.tensor([0.0, 3.0])}}
    silent = [replace(r, report={}) for r in replies]
    assert part.average_proposed_rates(state, round) == part.average_proposed_rates(state, replace(round, server=None))
    assert part.average_proposed_rates(state, replace(round, replies=silent)) is None


@pytest.mark.parametrize("model, rate", [("lenet", 0.378), ("cnn", 0.378), ("vgg11", 0.72), ("resnet18", 0.5)])
def test_the_pruned_net_is_the_masked_one_and_its_operations_are_those_of_its_layers(model, rate):
    net = build_model(model, SHAPE, 10, 0)
    plan = pruned_by(net, rate)
    small = net.cut(plan)
    x = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(2))
    masked = net.slicer.place(net.slicer.take(net.initial, plan), net.initial, plan)
    torch.testing.assert_close(small.forward(small.initial, x)[0], net.forward(masked, x)[0], rtol=1e-4, atol=1e-5)
    assert layers_of(small) + normed(small) == small.macs_forward < net.macs_forward


def normed(net: Net) -> int:
    """What batch norm adds: 4 for each number it makes."""
    made, hooks = [], []
    for layer in net.module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            hooks.append(layer.register_forward_hook(lambda _m, _i, out: made.append(4 * out.numel())))
    net.forward(net.initial, torch.zeros(1, *net.input_shape))
    for hook in hooks:
        hook.remove()
    return sum(made)


def layers_of(net: Net) -> int:
    """The operations of every convolution and linear layer, from the shapes that run through it."""
    total, seen = [0], []

    def note(layer, args, out):
        if isinstance(layer, nn.Conv2d):
            inside = layer.weight[0].numel()
            total[0] += inside * out[0].numel()
        else:
            total[0] += layer.weight.numel() * (args[0][0].numel() // layer.in_features)

    for layer in net.module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            seen.append(layer.register_forward_hook(note))
    net.forward(net.initial, torch.zeros(1, *net.input_shape))
    for hook in seen:
        hook.remove()
    return total[0]


def test_a_fixed_rate_prunes_the_run_and_the_ledger_follows():
    recipe = {"rounds": 5, "model": "lenet", "server_data": "share:0.1", "engine": "serial", "sample": 3}
    rows = shoal.run(method="fedap(at=3, rule='fixed', rate=0.5)", **recipe).history.rows
    macs, sizes = ([row[k] for row in rows] for k in ("macs_forward", "bytes_down"))
    assert len(set(macs[:3])) == len(set(macs[3:])) == 1 and macs[3] < macs[0]
    assert len(set(sizes[:3])) == len(set(sizes[3:])) == 1 and sizes[3] < sizes[0]


def test_the_model_that_comes_out_is_as_large_as_was_trained():
    result = shoal.run(
        method="fedap(at=1, rule='fixed', rate=0.5)+fedavgm+scaffold+topk",
        rounds=3,
        model="lenet",
        server_data="share:0.1",
    )
    assert result.params["conv2.weight"].shape[0] < 16
    assert result.params["conv2.weight"].shape[1] == result.params["conv1.weight"].shape[0]
    assert result.params["fc1.weight"].shape[1] == 25 * result.params["conv2.weight"].shape[0]


def test_momenta_and_memories_have_the_pruned_shape():
    loop, net = build_tiny_run(
        parse_method("fedavgm+scaffold+topk+fedap(at=1, rule='fixed', rate=0.5)", find_shipped_parts(), {})
    )
    standing, _ = play_rounds(loop, loop.start(net), 0, 2)
    width = len(standing.params["a.bias"])
    assert width < 3
    assert standing.states["fedavgm"]["m"]["a.weight"].shape == (width, 4)
    assert standing.states["scaffold"]["c"]["b.weight"].shape == (2, width)


def test_rates_are_weighed_by_samples_and_likeness():
    part = FedAP(at=1, epsilon=0.01)
    loop, net = build_tiny_run(compose([part]), (6, 3))
    asked = loop.open_round(loop.start(net), 0)
    outcomes = train_jobs(loop.host, asked.jobs_to_train)
    replies, _ = loop.exchange.decode_replies(asked.jobs, outcomes, asked.round, set())
    told = [float(r.report["fedap"]["rate"]) for r in replies]
    assert all(0 <= rate <= 0.8 for rate in told)
    round = replace(asked.round, replies=replies, params=asked.round.anchor, server=None)
    labels = {"device 0": torch.tensor([4.0, 2.0]), "device 1": torch.tensor([0.0, 3.0])}
    mean = part.average_proposed_rates({"labels": labels}, round)
    degrees, _ = compute_known_degrees(labels, [0, 1])
    weights = [6 / (degrees[0] + 0.01), 3 / (degrees[1] + 0.01)]
    assert mean == pytest.approx((weights[0] * told[0] + weights[1] * told[1]) / sum(weights))


def test_the_server_is_weighed_too_and_its_labels_are_not_among_everybodys():
    part = FedAP(at=1, epsilon=0.01)
    loop, net = build_tiny_run(compose([part]), (6, 3))
    asked = loop.open_round(loop.start(net), 0)
    round = replace(asked.round, replies=[], params=asked.round.anchor)
    assert round.server is not None
    seed = int(round.generator("server").integers(2**62))
    own = part.propose_rate(net, round.anchor, round.anchor, round.server, torch.Generator().manual_seed(seed))
    assert own is not None
    told = {0: 0.1, 1: 0.3}
    asked_two = loop.exchange.decode_replies(
        asked.jobs, train_jobs(loop.host, asked.jobs_to_train), asked.round, set()
    )[0]
    replies = [replace(r, report={"fedap": {"rate": torch.tensor(told[r.device])}}) for r in asked_two]
    labels = {"device 0": torch.tensor([4.0, 2.0]), "device 1": torch.tensor([0.0, 3.0])}
    counts = labels_of(round.server, 2).double()
    js = [
        *measure_label_degrees(np.array([[4, 2], [0, 3]])),
        measure_label_degree(counts.numpy(), np.array([4.0, 5.0])),
    ]
    weights = [n / (d + 0.01) for n, d in zip((6, 3, len(round.server)), js)]
    expected = np.average([0.1, 0.3, own], weights=weights)
    assert part.average_proposed_rates({"labels": labels}, replace(round, replies=replies)) == pytest.approx(expected)


def test_a_device_that_lost_its_round_does_not_stop_the_pruning():
    """The round in which it is due is void: nobody answered. It comes in the next one."""
    loop, net = build_tiny_run(compose([FedAP(at=2)]))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    asked = loop.open_round(standing, 1)
    void, row = loop.close_round(asked, [], 0.0)
    assert row["void"] and not void.states["fedap"]["done"]
    after, _ = play_rounds(loop, void, 2, 3)
    assert after.states["fedap"]["done"]


def test_without_server_data_devices_report_ranks():
    method = "fedap(at=2, rule='fixed', rate=0.6)"
    rows = shoal.run(method=method, rounds=4, model="lenet", sample=3, engine="serial").history.rows
    assert rows[2]["macs_forward"] < rows[1]["macs_forward"]
    with pytest.raises(shoal.ShoalError, match="hrank looks at samples of the server"):
        shoal.run(method="hrank", rounds=1, model="lenet")


def test_hrank_prunes_the_same_share_of_every_layer():
    result = shoal.run(method="hrank(rate=0.5, at=1)", rounds=2, model="lenet", server_data="share:0.1")
    assert len(result.params["conv1.bias"]) == 3 and len(result.params["conv2.bias"]) == 8
    assert str(HRank(0.5, 1)) == "hrank(rate=0.5, at=1)"


def test_operations_are_counted_from_the_pruned_pass():
    net = lenet(SHAPE, 10)
    small = net.cut(pruned_by(net, 0.5))
    x = torch.zeros(1, *SHAPE)
    assert small.macs_forward == count_macs(lambda: small.forward(small.initial, x))


def test_a_pruned_run_is_taken_up_with_what_devices_remember(tmp_path):
    """Memories that lie on disk are cut once, whether they are older than the pruning or younger."""
    method = "fedap(at=1, rule='fixed')+scaffold"
    given: dict[str, Any] = {"data": "digits", "model": "lenet", "devices": 3, "sample": 2, "batch": 64}
    given |= {"server_data": "share:0.1", "engine": "serial", "checkpoint_every": 1}
    whole = shoal.run(method, rounds=4, **given)
    for rounds in (1, 2, 3):
        shoal.run(method, rounds=rounds, out=str(tmp_path / str(rounds)), **given)
        resumed = shoal.resume(tmp_path / str(rounds), rounds=4)
        assert all(torch.equal(resumed.params[k], v) for k, v in whole.params.items())
