"""The norm bound by hand: long updates are shortened, whatever combines them."""

import pytest
import torch
from one_weight import one_weight

from shoal.core.part import Part
from shoal.core.types import SERVER
from shoal.parts.fedexp import FedExP
from shoal.parts.hybridfl import HybridFL
from shoal.parts.normbound import NormBound, shrink_update
from shoal.testing.toy import toy

THREE = [[0], [4], [2]]
"""Two steps of rate 0.1 from 1 make the updates -0.19, 0.57 and 0.19."""


def play(*parts: Part, targets=THREE, x=None):
    return one_weight(parts, targets, steps=lambda _: 2, start=1.0, x=x)


@pytest.mark.parametrize(
    "part, expected, clipped, bound",
    [
        (NormBound(bound=0.3), 1 + (-0.19 + 0.3 + 0.19) / 3, 1 / 3, 0.3),
        (NormBound(bound=0.1), 1 + (-0.1 + 0.1 + 0.1) / 3, 1.0, 0.1),
        (NormBound(bound=0.6), 1 + 0.57 / 3, 0.0, 0.6),
        # the median of 0.19, 0.57 and 0.19
        (NormBound(), 1 + 0.19 / 3, 1 / 3, 0.19),
        (NormBound(times=2.0), 1 + 0.38 / 3, 1 / 3, 0.38),
    ],
    ids=str,
)
def test_updates_longer_than_the_bound_are_brought_to_it(part, expected, clipped, bound):
    sent, _, rows = play(part)
    assert sent == pytest.approx([expected])
    assert rows[0]["normbound.clipped"] == pytest.approx(clipped)
    assert rows[0]["normbound.bound"] == pytest.approx(bound)


def test_the_median_of_two_is_their_mean():
    # 0.19 and 0.57: 0.38
    sent, _, _ = play(NormBound(), targets=[[0], [4]])
    assert sent == pytest.approx([1 + (-0.19 + 0.38) / 2])


def test_a_hostile_update_moves_the_model_no_further_than_others():
    honest, _, _ = play(targets=[[2], [2], [2]])
    hostile, _, rows = play(NormBound(), targets=[[2], [2], [2]], x=[1.0, 1.0, -5.0])
    unbounded, _, _ = play(targets=[[2], [2], [2]], x=[1.0, 1.0, -5.0])
    assert abs(hostile[0] - honest[0]) <= 2 * 0.19 / 3 + 1e-12 < abs(unbounded[0] - honest[0])
    assert rows[0]["normbound.clipped"] == pytest.approx(1 / 3)


def test_what_comes_behind_sees_shortened_updates():
    # -0.19, 0.38 and mean 0.095: rate (0.0361 + 0.1444) / 2 / (2 * 0.009025) = 5
    for parts in ([NormBound(), FedExP(eps=0.0)], [FedExP(eps=0.0), NormBound()]):
        sent, _, rows = play(*parts, targets=[[0], [4]])
        assert rows[0]["fedexp.eta_g"] == pytest.approx(5.0) and sent == pytest.approx([1.475])


def test_the_norm_is_that_of_all_tensors_together_and_counters_stay():
    run = toy(NormBound(bound=1.0))
    reply = run.reply(0, 0.5)
    (bounded,), _ = NormBound(bound=1.0).sift([reply], {}, run.round("normbound", [reply]))
    length = torch.cat([v.flatten() for v in bounded.delta.values()]).norm()
    assert float(length) == pytest.approx(1.0)
    counted = shrink_update(run.reply(0, {"a": torch.tensor([2.0]), "count": torch.tensor(7)}), 0.5)
    assert counted.delta["a"].tolist() == [1.0] and int(counted.delta["count"]) == 7


def test_the_server_itself_is_not_bounded():
    run = toy([NormBound(bound=0.1), HybridFL()])
    replies = [run.reply(0, 1.0), run.reply(1, 0.001), run.reply(SERVER, 1.0, size=4)]
    sifted, _ = NormBound(bound=0.1).sift(replies, {}, run.round("normbound", replies))
    assert sifted[1] is replies[1] and sifted[2] is replies[2] and sifted[0] is not replies[0]
    assert not any(row.get("void") for row in run.play(2))


@pytest.mark.parametrize("values", [{"bound": -1.0}, {"times": 0.0}, {"bound": float("nan")}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="needs"):
        NormBound(**values)
