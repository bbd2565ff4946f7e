"""FedACG by hand: devices start ahead of the mean, which is judged."""

import pytest
from one_weight import one_weight

from shoal.core.part import Part
from shoal.parts.fedacg import FedACG
from shoal.parts.fedprox import FedProx
from shoal.testing.toy import toy

TARGETS = [[0], [4]]


def play(part: Part, rounds: int = 3, targets=TARGETS):
    return one_weight([part], targets, rounds, steps=lambda _: 2, start=1.0)


def test_the_broadcast_runs_ahead_of_the_judged_mean():
    # round 1 is FedAvg's: w = 1.19, m = 0.19, v = 1.19 + 0.85 * 0.19 = 1.3515
    # round 2 from v: 1.3515 * 0.81 and 4 - 2.6485 * 0.81, mean 1.474715; m = 0.85 * 0.19 + 0.123215 = 0.284715
    sent, judged, rows = play(FedACG(beta=0.0))
    assert judged == pytest.approx([1.19, 1.474715, 1.770545], abs=1e-6)
    assert sent[:2] == pytest.approx([1.3515, 1.716723], abs=1e-6)
    assert [row["fedacg.momentum"] for row in rows] == pytest.approx([0.19, 0.284715, 0.29583], abs=1e-6)
    assert rows[0]["bytes_up"] == rows[0]["bytes_down"] == 2 * 8, "nothing travels beside the model"


def test_the_judged_model_is_the_mean_of_the_replies_and_the_last_one_plus_m():
    _, judged, rows = play(FedACG(lam=0.6, beta=0.3), 6, [[0], [4, 4, 4]])
    steps = [new - old for old, new in zip([1.0, *judged], judged)]
    assert steps == pytest.approx([row["fedacg.momentum"] for row in rows])


def test_without_momentum_it_is_fedprox():
    assert play(FedACG(lam=0.0, beta=0.7))[:2] == play(FedProx(mu=0.7))[:2]


def test_devices_are_pulled_to_what_they_received():
    # target 0: 0.9, then 0.9 - 0.1 (0.9 + (0.9 - 1)) = 0.82; target 4: 1.3, then 1.3 - 0.1 (-2.7 + (1.3 - 1)) = 1.54
    _, judged, _ = play(FedACG(beta=1.0), 1)
    assert judged == pytest.approx([(0.82 + 1.54) / 2])


def test_statistics_have_no_momentum():
    run = toy(FedACG())
    assert set(run.states["fedacg"]["m"]) == set(run.net.shared_trainable)


@pytest.mark.parametrize("values", [{"lam": 1.0}, {"lam": -0.1}, {"beta": -1.0}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match="needs"):
        FedACG(**values)
