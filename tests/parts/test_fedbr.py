"""FedBR, FedMLB and GMBS: blocks that travel, paths through them, and the bandit that picks how many."""

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.core.batch import Batch, BatchScore
from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.local.device import receive_model
from shoal.core.local.step import compute_autograd_gradient
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.core.types import Local
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.fleet.fleets import parse_fleet
from shoal.models import build_model
from shoal.models.lenet import lenet
from shoal.parts.fedbr import FedBR
from shoal.parts.feddrop import FedDrop
from shoal.parts.fedmlb import FedMLB
from shoal.parts.half import Half
from shoal.parts.lib.gmbs import (
    compute_block_rewards,
    count_pick,
    make_bandit,
    normalise_shares,
    pick_block_count,
    reward_pick,
)
from shoal.parts.lib.hybrid_paths import add_hybrid_paths, find_block_ends
from shoal.plugins.smoke_run import build_tiny_run
from shoal.runs.build import assemble_run
from shoal.testing.hosts import RecordingHost
from shoal.testing.rounds import assert_trees_close, play_rounds


# blocks -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["lenet", "cnn", "resnet18", "resnet18-gn", "vit", "mlp", "vgg11"])
def test_a_model_runs_on_from_any_block(model):
    net = build_model(model, (3, 32, 32), 10, 0)
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits, _, taps, _ = net.forward(net.initial, x, find_block_ends(net))
    for number, name in enumerate(find_block_ends(net), 1):
        torch.testing.assert_close(net.forward_from_block(net.initial, taps[name], number), logits)


def test_the_papers_blocks():
    net = build_model("resnet18-nobias", (3, 32, 32), 10, 0)
    sizes = [sum(net.initial[k].numel() for k in block if k in net.trainable) for block in net.names_by_block]
    assert sizes == [1856, 147968, 525568, 2099712, 8393728, 5130]
    net = build_model("resnet18-imagenet", (3, 32, 32), 10, 0)
    assert sum(net.initial[k].numel() for k in net.trainable) == 11_181_642 and len(net.blocks) == 6


# paths --------------------------------------------------------------------------------------------------------------
def scene():
    """A LeNet beside another one that was received, a batch, and the plain loss."""
    net = lenet((1, 28, 28), 4)
    net = replace(net, module=net.module.double())
    generator = torch.Generator().manual_seed(0)
    noise = lambda v: torch.randn(v.shape, generator=generator, dtype=v.dtype) * 0.05  # noqa: E731
    received = net.initial
    own = {k: v + noise(v) for k, v in received.items()}
    batch = Batch(
        torch.rand(3, 1, 28, 28, generator=generator, dtype=torch.float64), ((torch.tensor([0, 3, 1]), None),)
    )
    local = Local(net, received, {}, {}, {}, {})

    def inner(params, b) -> BatchScore:
        logits, features, taps, buffers = net.forward(params, b.inputs, find_block_ends(net), training=True)
        return BatchScore(CLASSIFY.compute_mean_loss(logits, b), logits, features, taps, buffers, {})

    return net, received, own, batch, inner, local


def test_the_loss_is_what_is_printed():
    net, received, own, batch, inner, local = scene()
    found = add_hybrid_paths(inner, local, (1, 2), 0.7, 0.3, 2.0)(own, batch)
    y = batch.targets[0][0]
    logits, _, taps, _ = net.forward(own, batch.inputs, find_block_ends(net))
    q_l, blocks = (logits / 2).log_softmax(1), len(net.blocks)
    paths = []
    for j in (1, 2):
        mixed = {
            k: received[k] if any(k in net.names_by_block[b] for b in range(blocks - j, blocks)) else own[k]
            for k in own
        }
        q_h = net.forward(mixed, batch.inputs)[0]
        apart = F.kl_div(q_l, (q_h / 2).softmax(1), reduction="batchmean")
        paths.append(0.7 * F.cross_entropy(q_h, y) + 0.3 * apart)
    torch.testing.assert_close(found.loss, F.cross_entropy(logits, y) + sum(paths) / 2)


def test_where_local_and_received_blocks_are_equal_paths_are_the_local_one():
    net, received, _, batch, inner, local = scene()
    found = add_hybrid_paths(inner, local, (1, 2, 3), 1.0, 1.0, 1.0)(received, batch)
    torch.testing.assert_close(found.loss, 2 * inner(received, batch).loss)


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_padded_paths_come_to_the_loss_and_gradient_of_those_that_a_device_has(alpha):
    net, _, own, batch, inner, local = scene()
    got = FedBR().pad_extras({"blocks": torch.ones(alpha, dtype=torch.uint8)}, net)
    assert got["path_shares"].tolist() == pytest.approx([1 / alpha] * alpha + [0.0] * (len(net.blocks) - 1 - alpha))
    results = []
    for extras in ({"blocks": torch.ones(alpha)}, got):
        scorer = FedBR(cross=0.7, distil=0.3, heat=2.0).objective(inner, local._replace(got=extras))
        grads, scored = compute_autograd_gradient(scorer, own, batch)
        results.append([grads, scored.loss])
    assert_trees_close(results[0], results[1], 1e-12, "padded paths are not those of the device")


def test_a_path_that_a_device_does_not_have_may_overflow():
    net, received, own, batch, inner, local = scene()
    first = net.names_by_block[1][0]  # the received block after the first: only the longest path goes through it
    local = local._replace(anchor=received | {first: received[first] * 1e308})
    own = own | {"conv1.weight": own["conv1.weight"] * 1e3}
    longest = len(net.blocks) - 1
    for alpha, is_finite in ((longest, False), (longest - 1, True)):
        got = FedBR().pad_extras({"blocks": torch.ones(alpha, dtype=torch.uint8)}, net)
        scorer = FedBR().objective(inner, local._replace(got=got))
        grads, scored = compute_autograd_gradient(scorer, own, batch)
        assert tree.is_tree_finite([grads, scored.loss]) == is_finite


def test_gradients_go_through_received_blocks_into_the_local_ones_before_them():
    net, received, own, batch, inner, local = scene()
    last = net.names_by_block[-1]
    for way in range(1, len(net.blocks)):

        def alone(params, b, way=way):
            scored = inner(params, b)
            full = add_hybrid_paths(inner, local, (way,), 1.0, 0.0, 1.0)(params, b)
            return full._replace(loss=full.loss - scored.loss)

        grads, _ = compute_autograd_gradient(alone, own, batch)
        assert grads[net.names_by_block[0][0]].abs().max() > 0
        assert max(float(grads[k].abs().max()) for k in last) < 1e-12
    assert all(torch.equal(received[k], net.initial[k]) for k in received)


def test_all_paths_and_no_memory_is_fedmlb():
    ends = []
    for part in (FedBR(tau=0, choose="all"), FedMLB()):
        loop, net = build_tiny_run(compose([part]), (4, 4))
        ends.append(play_rounds(loop, loop.start(net), 0, 3)[0].params)
    assert_trees_close(ends[0], ends[1], 1e-12, "fedbr with all blocks is not fedmlb")


def test_without_extra_terms_and_always_whole_it_is_fedavg():
    ends = []
    for parts in ([FedBR(tau=0, cross=0.0, distil=0.0)], []):
        loop, net = build_tiny_run(compose(parts), (4, 4))
        ends.append(play_rounds(loop, loop.start(net), 0, 3)[0].params)
    assert_trees_close(ends[0], ends[1], 1e-12, "fedbr without its terms is not fedavg")


# what travels -------------------------------------------------------------------------------------------------------
def sent(loop, standing, number):
    return {job.device: set(job.message.body) for job in loop.open_round(standing, number).jobs}


def test_the_whole_model_travels_every_other_round_and_to_newcomers():
    loop, net = build_tiny_run(compose([FedBR()]), (5, 3))
    everything, last = set(net.initial), {"b.weight", "b.bias"}
    standing = loop.start(net)
    assert sent(loop, standing, 0) == {0: everything, 1: everything}
    assert sent(loop, standing, 1) == {0: everything, 1: everything}, "nobody was here before"
    standing, _ = play_rounds(loop, standing, 0, 1)
    assert sent(loop, standing, 1) == {0: last, 1: last}
    assert sent(loop, standing, 2) == {0: everything, 1: everything}


def test_a_device_completes_what_it_is_sent_from_its_own_model():
    loop, net = build_tiny_run(compose([FedBR()]), (5, 3))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    machine = loop.host
    own = machine.memory.get(0)["fedbr"]["model"]
    job = loop.open_round(standing, 1).jobs[0]
    anchor, covered, _ = receive_model(machine.setup, job, machine.memory.get(0))
    assert not covered
    assert torch.equal(anchor["a.weight"], own["a.weight"]) and torch.equal(
        anchor["b.weight"], standing.params["b.weight"]
    )
    with pytest.raises(ShoalError, match="does not remember"):
        receive_model(machine.setup, job, {})


def test_who_did_not_answer_or_is_long_gone_is_sent_everything():
    loop, net = build_tiny_run(compose([FedBR(max_age=2)]), (5, 3))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    assert len(sent(loop, standing, 5)[0]) == 4 and len(sent(loop, standing, 1)[0]) == 2
    asked = loop.open_round(standing, 1)
    after, _ = loop.close_round(asked, train_jobs(loop.host, [asked.jobs[0]]), 0.0)
    assert len(sent(loop, after, 3)[1]) == 4 and len(sent(loop, after, 3)[0]) == 2


def test_devices_with_different_numbers_of_blocks_train_alike_on_every_engine():
    rows = {}
    for engine in ("serial", "batched"):
        result = shoal.run(
            method="fedbr",
            model="lenet",
            rounds=4,
            devices=6,
            sample=4,
            steps="3",
            engine=engine,
            precision="float64",
            eval_every=4,
        )
        rows[engine] = result
    sizes = [row["bytes_down"] for row in rows["serial"].history.rows]
    assert sizes == [row["bytes_down"] for row in rows["batched"].history.rows] and len(set(sizes)) > 2
    assert_trees_close(rows["serial"].params, rows["batched"].params, 1e-9, "fedbr trains to other numbers")


def test_devices_with_different_numbers_of_blocks_share_one_program():
    values = dict(method="fedbr", model="lenet", devices=6, sample=3, steps="2", batch=4)
    assembly = assemble_run(shoal.Recipe().with_values(**values))
    loop = assembly.loop
    engine = loop.host.engine = BatchedEngine(3)
    _, rows = play_rounds(loop, loop.start(assembly.net), 0, 4)
    assert len({row["fedbr.picked_blocks"] for row in rows}) > 1, "the devices must differ for this to show anything"
    assert len(engine.programs) == 1


def test_costs_are_those_of_the_paths_that_a_device_has():
    assembly = assemble_run(shoal.Recipe().with_values(method="fedbr", model="lenet", devices=6, steps="2", batch=4))
    loop, work = assembly.loop, {}
    pending = loop.open_round(loop.start(assembly.net), 0)
    for engine in (SerialEngine(), BatchedEngine(6)):
        loop.host.engine = engine
        work[type(engine)] = [outcome.macs_work for outcome in train_jobs(loop.host, pending.jobs)]
    assert work[SerialEngine] == work[BatchedEngine] and len(set(work[SerialEngine])) > 1


def test_a_bandit_on_lanes_of_different_forms():
    loop, net = build_tiny_run(compose([FedBR()]), (5, 3, 4), engine=BatchedEngine(3))
    standing, rows = play_rounds(loop, loop.start(net), 0, 4)
    assert all("void" not in row for row in rows) and len(standing.states["fedbr"]["arms"]) == 3


# counting -----------------------------------------------------------------------------------------------------------
def test_both_ways_of_counting_traffic():
    rows = shoal.run(method="fedbr", model="lenet", rounds=4, devices=6, sample=6, engine="serial").history.rows
    whole = rows[0]["bytes_by"]["down"]["model"]
    assert rows[0]["fedbr.bytes_down_by_blocks"] == whole and rows[0]["fedbr.sent_blocks"] == 5
    assert 1 <= rows[1]["fedbr.sent_blocks"] == rows[1]["fedbr.picked_blocks"] < 5
    loop, net = build_tiny_run(compose([FedBR()]), (5, 3))
    _, rows = play_rounds(loop, loop.start(net), 0, 2)
    assert rows[1]["fedbr.bytes_down_by_blocks"] == 2 * tree.count_tree_bytes(net.initial) // 2
    assert rows[1]["bytes_by"]["down"]["model"] == 2 * 8 * 8


def test_always_whole_is_what_the_paper_counts():
    """10 devices, 200 rounds, 42.65 MB, both ways: 170.6 GB."""
    assert 10 * 200 * 2 * 42.65e6 == pytest.approx(170.6e9)
    net = build_model("resnet18-imagenet", (3, 32, 32), 10, 0)
    size = sum(net.initial[k].nbytes for k in net.trainable)
    assert size / 2**20 == pytest.approx(42.65, abs=0.01)
    loop, tiny = build_tiny_run(compose([FedBR(tau=0)]), (5, 3))
    _, rows = play_rounds(loop, loop.start(tiny), 0, 3)
    assert all(row["fedbr.bytes_down_by_blocks"] == row["bytes_by"]["down"]["model"] for row in rows)


@pytest.mark.parametrize("beside", [[], [FedDrop()], [Half(down=True)]], ids=str)
def test_blocks_are_counted_as_they_travel(beside):
    """Against the messages themselves, also beside parts that plan or code."""
    loop, net = build_tiny_run(compose([FedBR(), *beside]), (5, 3, 4))
    spy = RecordingHost(loop.host)
    _, rows = play_rounds(replace(loop, host=spy), loop.start(net), 0, 4)
    for row, jobs in zip(rows, spy.jobs):
        blocks = [sum(any(name in job.message.body for name in block) for block in net.names_by_block) for job in jobs]
        assert row["fedbr.sent_blocks"] == pytest.approx(sum(blocks) / len(blocks))


@pytest.mark.parametrize("seconds, rounds, published", [(4.0, 130, 1075), (7.25, 109, 1258), (6.75, 107, 1182)])
def test_the_simulated_clock_gives_the_papers_times(seconds, rounds, published):
    """Of FedAvg, FedMLB and MOON, each device alike: 160 Mbit/s, 42.65e6 bytes both ways."""
    profile = parse_fleet(f"fedbr-even:{seconds}", RandomStreams(0), 10, rounds).get_profile(0, 0)
    total = profile.estimate_times(int(42.65e6), 10**9, int(42.65e6)).total
    assert rounds * total == pytest.approx(published, rel=0.01)


# GMBS ---------------------------------------------------------------------------------------------------------------
def test_a_choice_by_hand():
    arm = {"p": [0.1, 0.5, 0.2], "n": [0.0, 3.0, 1.0]}
    bonus = sqrt(log(6))
    assert max(0.1 + bonus, 0.5 + bonus / 4, 0.2 + bonus / 2) == 0.1 + bonus and pick_block_count(arm, 4) == 1
    assert pick_block_count(count_pick(count_pick(arm, 1), 1), 4) == 3
    assert reward_pick(arm, 2, 1.0, 0.5)["p"] == [0.1, 0.75, 0.2]


def test_the_bonus_counts_rounds_from_1():
    """Round 1 of the run is the paper's t = 2: sqrt(ln 3) = 1.048 for what was never tried, 0.5 + 1.048 / 2 = 1.024 for
    what was tried once and paid 0.5; in round 0, t = 1, it is sqrt(ln 2) = 0.833 and 0.916."""
    arm = {"p": [0.0, 0.5], "n": [0.0, 1.0]}
    assert [pick_block_count(arm, number) for number in (0, 1)] == [2, 1]


@given(st.integers(2, 6), st.integers(0, 30))
def test_the_first_choices_are_all_different_while_nothing_is_known(arms, start):
    arm, seen = make_bandit(arms), []
    for number in range(start, start + arms):
        seen.append(pick_block_count(arm, number))
        arm = count_pick(arm, seen[-1])
    assert sorted(seen) == list(range(1, arms + 1))


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 1e6), min_size=1))
def test_shares_sum_to_one(values):
    assert sum(normalise_shares(values).values()) == pytest.approx(1)


def test_a_reward_by_hand():
    paid = compute_block_rewards({0: 3.0, 1: 1.0}, {0: 0.2, 1: -0.4}, {0: 1.0, 1: 1.0}, {0: 2.0, 1: 6.0})
    assert paid[0] == pytest.approx(0.75 * 0.2 / exp(0.5 + 0.25))
    assert paid[1] == pytest.approx(0.25 * -0.4 / exp(0.5 + 0.75))
    assert compute_block_rewards({0: 0.0}, {0: 1.0}, {0: 5.0}, {0: 5.0}) == {0: pytest.approx(exp(-2))}


def test_the_first_time_counts_and_pays_nothing():
    loop, net = build_tiny_run(compose([FedBR()]), (5, 3))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    arms = standing.states["fedbr"]["arms"]
    assert [arm["p"] for arm in arms.values()] == [[0.0], [0.0]] and [arm["n"] for arm in arms.values()] == [
        [1.0],
        [1.0],
    ]
    later, _ = play_rounds(loop, standing, 1, 2)
    assert all(arm["p"] != [0.0] for arm in later.states["fedbr"]["arms"].values())


def test_random_blocks_need_no_bandit_to_differ():
    rows = shoal.run(method="fedbr_ran", model="lenet", rounds=4, devices=6, sample=6, engine="serial").history.rows
    sizes = [row["bytes_by"]["down"]["model"] for row in rows]
    assert sizes[1] < sizes[0] == sizes[2]


@pytest.mark.whole
@pytest.mark.parametrize("method", ["fedbr+fedprox", "fedmlb+fjord", "fedmlb+topk", "fedbr+mixup", "fedmlb+scaffold"])
def test_compositions_learn(method):
    result = shoal.run(method=method, rounds=5, devices=6, sample=6, epochs="2", engine="batched")
    assert result.history.rows[-1]["accuracy"] > 0.3


def test_a_codec_of_differences_is_refused():
    with pytest.raises(ShoalError, match="returns whole models"):
        shoal.run(method="fedbr+topk", rounds=1)
    with pytest.raises(ShoalError, match="works on blocks"):
        FedMLB().model(Net(nn.Sequential(nn.Linear(3, 2)), (3,), 2))
