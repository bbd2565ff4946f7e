"""FedExP by hand: the server's rate grows with the disagreement of the updates."""

import pytest
import torch
from one_weight import one_weight

from shoal.parts.fedexp import FedExP
from shoal.testing.toy import toy


def play(eps: float, rounds: int = 1, targets=((0,), (4,))):
    return one_weight([FedExP(eps=eps)], targets, rounds, steps=lambda _: 2, start=1.0)


def test_the_rate_has_the_factor_one_half():
    # the deltas are -0.19 and 0.57, their mean 0.19: (0.0361 + 0.3249) / 2 / (2 * 0.0361) = 2.5
    sent, judged, rows = play(0.0)
    assert rows[0]["fedexp.eta_g"] == pytest.approx(2.5)
    assert sent == pytest.approx([1.475]) and judged == sent, "after the first round the model itself is judged"
    assert rows[0]["bytes_up"] == 2 * 8


def test_eps_bounds_the_rate():
    # 0.1805 / (2 * 0.0371) = 2.432615
    sent, _, rows = play(0.001)
    assert rows[0]["fedexp.eta_g"] == pytest.approx(2.432615, abs=1e-6)
    assert sent == pytest.approx([1.462197], abs=1e-6)
    # with the authors' eps, which is multiplied by the number of replies
    assert play(0.002)[2][0]["fedexp.eta_g"] == pytest.approx(2.368766, abs=1e-6)


def test_then_the_mean_of_the_last_two_is_judged():
    sent, judged, _ = play(0.001, 4)
    assert judged[1:] == pytest.approx([(a + b) / 2 for a, b in zip(sent, sent[1:])])


def test_weights_of_replies_count():
    # weights 1/4 and 3/4: the mean is 0.38, that of the squares 0.2527, and 0.2527 / (2 * 0.1444) is below 1
    sent, _, rows = play(0.0, targets=((0,), (4, 4, 4)))
    assert rows[0]["fedexp.eta_g"] == 1.0 and sent == pytest.approx([1.38])


def test_equal_replies_are_fedavg():
    sent, _, rows = play(0.0, 3, ((4,), (4,)))
    assert [row["fedexp.eta_g"] for row in rows] == [1.0] * 3
    assert sent == pytest.approx(one_weight([], [[4]], 3, steps=lambda _: 2, start=1.0)[0])


def test_without_eps_the_rate_does_not_depend_on_the_length_of_updates():
    rates = []
    for scale in (1.0, 1e-3):
        run = toy(FedExP(eps=0.0))
        replies = [run.reply(0, 0.3 * scale), run.reply(1, -0.1 * scale)]
        mean = {k: v + 0.1 * scale for k, v in run.params.items()}
        round = run.round("fedexp", replies)
        FedExP(eps=0.0).serve(mean, run.states["fedexp"], round)
        rates.append(float(round.telling.numbers["fedexp.eta_g"]))
    assert rates == pytest.approx([(0.09 + 0.01) / 2 / 0.02] * 2)


def test_a_mean_of_zero_stays():
    run = toy(FedExP(eps=0.0))
    round = run.round("fedexp", [run.reply(0, 0.3), run.reply(1, -0.3)])
    params, _ = FedExP(eps=0.0).serve(run.params, run.states["fedexp"], round)
    assert all(torch.equal(params[k], v) for k, v in run.params.items())


def test_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match="needs"):
        FedExP(eps=-1.0)
