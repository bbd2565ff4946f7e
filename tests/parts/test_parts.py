"""Every part on a model of one weight, with numbers worked out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from one_weight import one_weight
from torch import Tensor

import shoal
from shoal.core.batch import Samples
from shoal.core.compose import Method
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Optimiser, Round, Work
from shoal.parts.fedacd import FedACD
from shoal.parts.feddyn import FedDyn
from shoal.parts.fednova import FedNova, compute_effective_steps
from shoal.parts.fedprox import FedProx
from shoal.parts.hybridfl import HybridFL
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.median import Median
from shoal.parts.scaffold import Scaffold
from shoal.parts.server_adaptive import FedAdam, FedYogi
from shoal.parts.server_momentum import FedAvgM
from shoal.parts.trimmed_mean import TrimmedMean
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import play_rounds


def test_fedavg_weighs_by_samples():
    # after one step of rate 0.1 from 0: w_A = 0.1 * 1, w_B = 0.1 * 3; mean with weights 1/4 and 3/4
    sent, _, _ = one_weight([], [[1], [3, 3, 3]])
    assert sent == pytest.approx([0.25])


def test_local_steps_momentum_decay_and_clip():
    # two steps towards 1: 0.1, then 0.1 + 0.1 * 0.9
    assert one_weight([], [[1]], steps=lambda _: 2)[0] == pytest.approx([0.19])
    # momentum 0.5: the second update is 0.5 * (-1) + (-0.9) = -1.4
    assert one_weight([], [[1]], steps=lambda _: 2, optimiser=Optimiser(momentum=0.5))[0] == pytest.approx([0.24])
    # weight decay 1: the second gradient is (0.1 - 1) + 0.1
    assert one_weight([], [[1]], steps=lambda _: 2, optimiser=Optimiser(weight_decay=1.0))[0] == pytest.approx([0.18])
    # a gradient of norm 7 is clipped to 2
    assert one_weight([], [[7]], optimiser=Optimiser(clip=2.0))[0] == pytest.approx([0.2], rel=1e-6)
    # clipping comes before decay: the gradients -1 and -0.92 both become -0.8, then 3 * 0.08 is added to the second
    sent = one_weight([], [[1]], steps=lambda _: 2, optimiser=Optimiser(weight_decay=3.0, clip=0.8))[0]
    assert sent == pytest.approx([0.08 + 0.1 * (0.8 - 3 * 0.08)], rel=1e-5)


def test_fedprox_pulls_back_to_the_anchor():
    # step 1: 0.1; step 2: gradient (0.1 - 1) + 1 * (0.1 - 0) = -0.8
    assert one_weight([FedProx(mu=1.0)], [[1]], steps=lambda _: 2)[0] == pytest.approx([0.18])


def test_fednova_counts_steps_out():
    # A makes 1 step to 0.1; B makes 2 to 0.3 + 0.1 * 2.7 = 0.57; mean of 1 and 2 steps is 1.5
    sent, _, rows = one_weight([FedNova()], [[1, 1], [3, 3]], steps=lambda device: device + 1)
    assert sent == pytest.approx([1.5 * (0.5 * 0.1 / 1 + 0.5 * 0.57 / 2)])
    assert rows[0]["bytes_up"] == 2 * (8 + 4) and rows[0]["bytes_down"] == 2 * 8


def test_fednova_effective_steps_with_momentum():
    assert compute_effective_steps(1, Optimiser(0.5)) == pytest.approx(1.0)
    # a constant gradient enters with 1 and then with 1.5
    assert compute_effective_steps(2, Optimiser(0.5)) == pytest.approx(2.5)
    assert compute_effective_steps(7, Optimiser()) == 7


def test_scaffold_takes_out_the_drift():
    # round 1 is FedAvg: 0.1 and 0.3; then c_A = -1, c_B = -3, c = -2
    # round 2 from 0.2: A steps along -0.8 + 1 - 2 = -1.8, B along -2.8 + 3 - 2 = -1.8; both reach 0.38
    sent, _, rows = one_weight([Scaffold()], [[1, 1], [3, 3]], rounds=2)
    assert sent == pytest.approx([0.2, 0.38])
    assert rows[1]["bytes_down"] == rows[1]["bytes_up"] == 2 * 16


def test_scaffold_moves_c_by_the_share_of_devices_that_answered():
    # device B never answers (its update is not finite); c moves by half of A's change: c = -0.5, c_A = -1
    # round 2 from 0.1: A steps along (0.1 - 1) + 1 - 0.5 = -0.4
    sent, _, rows = one_weight([Scaffold()], [[1], [1]], rounds=2, x=[1.0, float("inf")])
    assert sent == pytest.approx([0.1, 0.14])
    assert rows[0]["dropped"] == [{"device": 1, "why": "its update is not finite"}]


def test_scaffold_weighs_control_variates_as_it_weighs_replies():
    # round 1 is FedAvg with weights 1/4 and 3/4: 0.1 and 0.3 make 0.25; c_A = -1, c_B = -3, c = -2.5
    # round 2 from 0.25: A steps along -0.75 + 1 - 2.5 and B along -2.75 + 3 - 2.5, both -2.25, the slope of the whole
    sent, _, _ = one_weight([Scaffold()], [[1], [3, 3, 3]], rounds=2)
    assert sent == pytest.approx([0.25, 0.475])


UNEVEN = (7, 1, 4, 2, 5)


def kept_after(
    method: Method, rounds: int, sample: int, part: str = "scaffold", at_server: str = "c", on_device: str = "c_k"
) -> tuple[Params, list[Params]]:
    """What a part keeps on the server, and on each of the uneven devices (zeros where one never took part)."""
    loop, net = build_tiny_run(method, UNEVEN)
    loop = replace(loop, sample=sample)
    standing, _ = play_rounds(loop, loop.start(net), 0, rounds)
    whole = standing.states[part][at_server]
    known = [loop.host.memory.get(device).get(part, {}).get(on_device) for device in range(len(UNEVEN))]
    return whole, [own or tree.make_zeros(whole) for own in known]


def weighted_mean(trees: list[Params], shares: Sequence[float]) -> Params:
    return {k: sum((s * own[k] for s, own in zip(shares, trees)), torch.zeros_like(v)) for k, v in trees[0].items()}


@pytest.mark.parametrize("rounds, sample", [(1, 2), (3, 2), (7, 2), (4, 5)])
def test_scaffolds_c_is_always_the_mean_of_all_devices_by_samples(rounds, sample):
    c, each = kept_after(Method((Scaffold(),)), rounds, sample)
    shares = [n / sum(UNEVEN) for n in UNEVEN]
    torch.testing.assert_close(c, weighted_mean(each, shares), rtol=1e-12, atol=1e-12)
    assert all(any(v.any() for v in own.values()) for own in each) == (rounds > 1), (
        "only the first round leaves any out"
    )
    assert max(float((c[k] - v).abs().max()) for k, v in weighted_mean(each, [0.2] * 5).items()) > 1e-6


@pytest.mark.parametrize("setter", [FedDyn(), FedACD()], ids=str)
def test_where_a_part_sets_weights_that_know_no_sizes_c_is_the_plain_mean(setter):
    c, each = kept_after(Method((setter, Scaffold())), 6, 2)
    torch.testing.assert_close(c, weighted_mean(each, [0.2] * 5), rtol=1e-12, atol=1e-12)


def test_with_all_devices_scaffolds_corrections_cancel_in_the_mean():
    """So the first steps of all devices move their mean as one step on all their samples would."""
    loop, net = build_tiny_run(Method((Scaffold(),)), UNEVEN)
    one = lambda round, device: Work(0.0, 1, 1000, 0.5)  # noqa: E731
    loop = replace(loop, work=one)
    standing, _ = play_rounds(loop, loop.start(net), 0, 3)
    after, _ = play_rounds(loop, standing, 3, 4)
    samples = [loop.host.setup.samples(device) for device in range(len(UNEVEN))]
    everything = Samples(samples[0].inputs, samples[0].targets, torch.cat([own.index for own in samples]))
    gradient = compute_loss_gradient(net, standing.params, everything)
    expected = {k: standing.params[k] - 0.5 * g for k, g in gradient.items()}
    torch.testing.assert_close(tree.select_params(after.params, expected), expected, rtol=1e-12, atol=1e-12)


def test_feddyn_broadcasts_the_mean_plus_h():
    # round 1: 0.1 and 0.3, mean 0.2, h = (0.1 + 0.3) / 2; judged 0.2, broadcast 0.4
    # round 2 from 0.4: A: -0.6 + 0.1 -> 0.45, B: -2.6 + 0.3 -> 0.63; mean 0.54, h = 0.2 + (0.05 + 0.23) / 2 = 0.34
    sent, judged, _ = one_weight([FedDyn(alpha=1.0)], [[1, 1], [3, 3]], rounds=2)
    assert judged == pytest.approx([0.2, 0.54])
    assert sent == pytest.approx([0.4, 0.88])


@dataclass(frozen=True)
class WithoutTheFirst(Part):
    """The reply of device 0 counts for nothing."""

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return weights * torch.tensor([reply.device != 0 for reply in round.replies]), state


@pytest.mark.parametrize("other", [(), (HybridFL(),), (WithoutTheFirst(),)], ids=["alone", "hybridfl", "without"])
def test_feddyns_h_is_always_the_plain_mean_of_all_devices(other):
    """Its replies all count alike too; the server, where it takes part, is none of the devices."""
    h, each = kept_after(Method((FedDyn(alpha=0.5), *other)), 6, 2, "feddyn", "h", "h")
    assert all(v.any() for v in each[0].values())
    torch.testing.assert_close(h, weighted_mean(each, [0.2] * 5), rtol=1e-12, atol=1e-12)


def test_feddyn_regularises_small_devices_harder_and_means_plainly():
    # sizes 1 and 3, mean 2: alpha_k = 1 / 0.5 and 1 / 1.5; two steps from 0
    # A: 0.1, then (0.1 - 1) + 2 * 0.1 = -0.7 -> 0.17; B: 0.3, then (0.3 - 3) + 0.3 / 1.5 = -2.5 -> 0.55
    _, judged, _ = one_weight([FedDyn(alpha=1.0)], [[1], [3, 3, 3]], steps=lambda _: 2)
    assert judged == pytest.approx([(0.17 + 0.55) / 2])


def test_server_momentum_rolls_on():
    # round 1: 0.1, m = -0.1; round 2: local 0.19, m = 0.9 * -0.1 + (0.1 - 0.19) = -0.18
    assert one_weight([FedAvgM(beta=0.9)], [[1]], rounds=2)[0] == pytest.approx([0.1, 0.28])


def test_server_adam_and_yogi():
    # d = 0.1, m = 0.1 * d = 0.01; Adam: v = 0.99e-6 + 0.01 * d^2; Yogi: v = 1e-6 + 0.01 * d^2
    adam, yogi = (one_weight([part], [[1]])[0][0] for part in (FedAdam(), FedYogi()))
    assert adam == pytest.approx(0.1 * 0.01 / (np.sqrt(0.99e-6 + 1e-4) + 1e-3))
    assert yogi == pytest.approx(0.1 * 0.01 / (np.sqrt(1e-6 + 1e-4) + 1e-3))


def test_yogi_lets_v_fall_by_a_step_of_its_own_size():
    # with tau = 1, v starts at 1, far above d^2 = 0.01, and loses 0.01 * d^2
    assert one_weight([FedYogi(tau=1.0)], [[1]])[0][0] == pytest.approx(0.001 / (np.sqrt(1 - 1e-4) + 1))


def test_median_and_trimmed_mean():
    assert one_weight([Median()], [[1], [2], [6]])[0] == pytest.approx([0.2])
    assert one_weight([Median()], [[1], [2], [4], [6]])[0] == pytest.approx([0.3])
    assert one_weight([TrimmedMean(trim=0.25)], [[1], [2], [4], [7]])[0] == pytest.approx([0.3])
    assert one_weight([TrimmedMean(trim=0.2)], [[1], [2], [6]])[0] == pytest.approx([0.3])


def test_order_of_devices_does_not_matter_to_robust_rules():
    for part in (Median(), TrimmedMean(trim=0.25)):
        one, other = (one_weight([part], [[a], [b], [c], [d]])[0] for a, b, c, d in ((1, 2, 4, 7), (7, 1, 4, 2)))
        assert one == other


def test_weighted_selection_prefers_large_devices():
    common: dict[str, Any] = dict(devices=30, sample=5, rounds=12, eval_every=100, split="dirichlet:0.1")
    sizes = np.array(sizes_of(**common))
    by_size = np.mean([sizes[d].mean() for d in shoal.run("weighted(power=2.0)", **common).history["devices"]])
    uniform = np.mean([sizes[d].mean() for d in shoal.run("fedavg", **common).history["devices"]])
    assert by_size > 1.3 * uniform


def test_uniform_selection_takes_its_share():
    history = shoal.run("uniform(share=0.3)", devices=20, sample=5, rounds=4, split="iid").history
    assert [len(d) for d in history["devices"]] == [6] * 4
    assert len({tuple(d) for d in history["devices"]}) > 1


def test_removing_a_bad_reply_equals_not_having_that_device():
    with_it, _, rows = one_weight([], [[1], [2, 2], [5]], rounds=2, x=[1.0, 1.0, float("nan")])
    without, _, _ = one_weight([], [[1], [2, 2]], rounds=2)
    assert with_it == without
    assert all(row["dropped"][0]["device"] == 2 and "void" not in row for row in rows)


@pytest.mark.parametrize("parts", [[], [FedAvgM()], [Scaffold()], [Median()], [FedDyn()]], ids=str)
def test_a_round_without_any_good_reply_is_void(parts):
    sent, _, rows = one_weight(parts, [[1], [2]], rounds=2, x=[float("inf"), float("nan")])
    assert sent == [0.0, 0.0]
    assert all(row["void"] and len(row["dropped"]) == 2 for row in rows)


def test_values_out_of_range_are_refused():
    for make in (
        lambda: FedProx(mu=-1.0),
        lambda: FedProx(mu=float("nan")),
        lambda: FedDyn(alpha=float("inf")),
        lambda: FedAvgM(beta=1.0),
        lambda: FedAdam(tau=0.0),
        lambda: TrimmedMean(trim=0.5),
    ):
        with pytest.raises(ValueError, match="needs"):
            make()


def sizes_of(**recipe) -> list[int]:
    from shoal.runs.build import assemble_run

    return assemble_run(shoal.Recipe().with_values(**recipe)).loop.sizes.tolist()


def test_everything_is_in_double_precision_where_asked():
    result = shoal.run("fedprox+scaffold", precision="float64", rounds=2)
    assert all(p.dtype == torch.float64 for p in result.params.values())


@pytest.mark.parametrize("momentum, says", [(0.0, False), (0.5, False), (0.9, True)])
def test_scaffold_says_that_momentum_makes_its_corrections_grow(momentum, says, caplog):
    with caplog.at_level("INFO", "shoal"):
        shoal.run("scaffold", rounds=2, devices=4, sample=2, steps="1", momentum=momentum, engine="serial")
    told = [record.message for record in caplog.records if "momentum" in record.message]
    assert len(told) == says and all("9.0 times" in text for text in told)
