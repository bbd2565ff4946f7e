"""FedDU and FedDUM: how far the server goes on its own samples, and momentum on both sides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.core.compose import compose
from shoal.core.measures.divergence import measure_label_degree
from shoal.core.model import tree
from shoal.core.session import train_jobs
from shoal.core.types import Work
from shoal.engines.batched.engine import BatchedEngine
from shoal.parts.device_momentum import DeviceM
from shoal.parts.feddu import FedDU, compute_server_data_share, count_server_steps, evaluate_on_server
from shoal.parts.server_momentum import FedAvgM
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import assert_trees_close, play_rounds


def half_time(part: FedDU, sizes=(5, 3)):
    """The state and the round of a tiny run when the replies are in."""
    loop, net = build_tiny_run(compose([part]), sizes)
    asked = loop.open_round(loop.start(net), 0)
    replies, _ = loop.exchange.decode_replies(
        asked.jobs, train_jobs(loop.host, asked.jobs_to_train), asked.round, set()
    )
    weights = torch.tensor([r.size for r in replies], dtype=torch.float64)
    return asked.states["feddu"], replace(asked.round, replies=replies, weights=weights / weights.sum())


def test_the_whole_way_is_the_servers_own_training():
    part = FedDU(steps=10**6)
    state, round = half_time(part)
    moved, _ = part.serve(round.anchor, state, round)
    assert_trees_close(moved, round.learn(round.anchor, round.work), 1e-12, "alpha is 1")


def test_the_share_of_the_way_is_so_many_steps_of_the_mean_gradient():
    """w + alpha (w_srv - w) = w - tau_eff lr g, g = (w - w_srv) / (lr tau)."""
    part = FedDU(steps=1)
    state, round = half_time(part)
    tau, lr = count_server_steps(4, round), round.work.lr
    assert tau == 2
    trained = round.learn(round.anchor, round.work)
    gradient = {k: (round.anchor[k] - trained[k]) / (lr * tau) for k in trained}
    moved, _ = part.serve(round.anchor, state, round)
    assert_trees_close(moved, {k: round.anchor[k] - 1 * lr * g for k, g in gradient.items()}, 1e-12, "the step form")


def test_alpha_by_hand():
    part = FedDU(decay=0.5)
    state, round = half_time(part)
    assert round.server is not None
    correct, _ = evaluate_on_server(round.net, round.anchor, round.server)
    labels = [state["labels"][f"device {d}"].numpy() for d in (0, 1)]
    batch = round.server.take_all().targets[0][0]
    own = np.bincount(batch.numpy(), minlength=2).astype(float)
    everybody = labels[0] + labels[1]
    taken = 4 * measure_label_degree(everybody, everybody)  # everybody took part: their labels are everybody's
    assert taken == 0
    assert part.compute_effective_share(correct, state["labels"], round) == pytest.approx(
        0 if measure_label_degree(own, everybody) else 4 / 12 * (1 - correct)
    )
    one = replace(round, replies=round.replies[:1], number=3)
    up, down = 4 * measure_label_degree(labels[0], everybody), 5 * measure_label_degree(own, everybody)
    assert part.compute_effective_share(0.25, state["labels"], one) == pytest.approx(0.75 * up / (up + down) * 0.5**3)
    inverse = FedDU(accuracy="inverse", epsilon=0.05, decay=1.0)
    assert inverse.compute_effective_share(0.25, state["labels"], one) == pytest.approx(up / (up + down) / 0.3)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=2), min_size=2, max_size=2))
def test_a_share_lies_between_0_and_1(correct, counts):
    part = FedDU(decay=1.0)
    state, round = half_time(part)
    labels = {f"device {d}": torch.tensor(own, dtype=torch.float64) for d, own in enumerate(counts)}
    assert 0 <= part.compute_effective_share(correct, labels, round) <= 1
    assert part.compute_effective_share(1.0, labels, round) == 0


@given(*[st.floats(0, 1)] * 4)
def test_a_share_rises_with_the_devices_degree_and_falls_with_the_servers(low, high, other, same):
    low, high = sorted((low, high))
    assert (
        0 <= compute_server_data_share(40, 100, other, low) <= compute_server_data_share(40, 100, other, high) + 1e-12
        or other == 0
    )
    assert (
        1 >= compute_server_data_share(40, 100, low, same) >= compute_server_data_share(40, 100, high, same) - 1e-12
        or same == 0
    )
    assert compute_server_data_share(40, 100, 0.0, 0.0) == 40 / 140


def test_a_step_that_hurts_is_undone():
    loop, net = build_tiny_run(compose([FedDU(steps=10**6)]))
    loop = replace(loop, work=lambda round, device: Work(1.0, 0, 2, 1e4 if device == -1 else 0.1))
    after, _ = play_rounds(loop, loop.start(net), 0, 1)
    plain, _ = build_tiny_run(compose([]))
    expected, _ = play_rounds(plain, plain.start(net), 0, 1)
    assert_trees_close(after.params, expected.params, 1e-12, "the server's step was kept")


def test_without_samples_on_the_server_it_is_refused():
    with pytest.raises(shoal.ShoalError, match="trains on samples of the server, and there are none"):
        shoal.run(method="feddu", rounds=1)


def test_the_server_trains_alike_on_every_engine():
    ends = []
    for crew in (None, BatchedEngine(2)):
        loop, net = build_tiny_run(compose([FedDU(steps=10**6)]), (5, 3, 4), momentum=0.5, engine=crew)
        ends.append(play_rounds(loop, loop.start(net), 0, 3)[0].params)
    assert_trees_close(ends[0], ends[1], 1e-9, "the server trains to other numbers")


# momentum -----------------------------------------------------------------------------------------------------------
def run_of(*parts):
    loop, net = build_tiny_run(compose(list(parts)))
    return play_rounds(loop, loop.start(net), 0, 3)[0].params


def test_without_momenta_feddum_is_feddu():
    bare = run_of(FedDU(), DeviceM(0.0), FedAvgM(0.0, 1.0, ema=True, start="first"))
    assert_trees_close(bare, run_of(FedDU()), 1e-12, "feddum without momenta")


def test_a_running_mean_of_equal_changes_is_that_change():
    part = FedAvgM(0.9, ema=True)
    state, round = half_time(FedDU())
    state = part.init_server(round)
    change = {k: torch.ones_like(v) for k, v in round.anchor.items()}
    for _ in range(200):
        params, state = part.serve(tree.subtract_params(round.anchor, change), state, round)
    assert_trees_close(state["m"], change, 1e-8, "m is not the change")
    assert_trees_close(params, tree.subtract_params(round.anchor, change), 1e-8, "the step is not the change")


def test_the_first_change_is_taken_as_it_is():
    part = FedAvgM(0.9, ema=True, start="first")
    _, round = half_time(FedDU())
    moved = {k: v - 2.0 for k, v in round.anchor.items()}
    params, state = part.serve(moved, part.init_server(round), round)
    assert_trees_close(params, moved, 1e-12, "the first step")
    _, state = part.serve({k: v - 1.0 for k, v in round.anchor.items()}, state, round)
    assert float(tree.collect_tensors(state["m"])[0].flatten()[0]) == pytest.approx(0.9 * 2 + 0.1 * 1)


def test_device_momentum_by_hand():
    part = DeviceM(0.75)
    state = {"m": {"w": torch.tensor([1.0])}}
    update, state = part.step({"w": torch.tensor([5.0]), "b": torch.tensor([3.0])}, state, None, None)  # type: ignore[arg-type]
    assert update["w"].tolist() == [2.0] and update["b"].tolist() == [3.0] and state["m"]["w"].tolist() == [2.0]


@pytest.mark.parametrize(
    "method", ["feddum", "feddumap", "fedduap", "feddu(steps=2)", "feddu+fjord", "feddu+fedacd+mixup"]
)
def test_presets_and_compositions_learn(method):
    result = shoal.run(
        method=method.replace("fedap", "fedap(at=2)"), rounds=6, server_data="share:0.1:5", engine="serial", epochs="2"
    )
    assert result.history.rows[-1]["accuracy"] > 0.3
