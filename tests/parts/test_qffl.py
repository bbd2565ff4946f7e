"""q-FFL by hand: replies count by the loss of the received model, which devices measure."""

from math import log

import pytest
import torch
from one_weight import OneWeight, one_weight
from torch.nn.functional import cross_entropy

from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.parts.feddrop import FedDrop
from shoal.parts.feddyn import FedDyn
from shoal.parts.median import Median
from shoal.parts.qffl import QFFL
from shoal.testing.toy import Toy, toy

LOSSES = (0.5, 4.5)
"""Half the squared distance of 1 from the targets 0 and 4, whose updates are -0.19 and 0.57."""


def one_weight_toy(part: QFFL) -> Toy:
    inputs = torch.ones(12, 1, dtype=torch.float64)
    return toy(part, net=Net(OneWeight(1.0), (1,), 8), inputs=inputs, targets=torch.zeros(12, dtype=torch.long))


def combine(q: float, losses=LOSSES, weights=()) -> float:
    run, part = one_weight_toy(QFFL(q)), QFFL(q)
    replies = [
        run.reply(device, delta, {"qffl": {"loss": torch.tensor(loss)}})
        for device, (delta, loss) in enumerate(zip((-0.19, 0.57), losses))
    ]
    params, _ = part.combine(replies, {}, run.round("qffl", replies, weights))
    return float(params["weight"])


@pytest.mark.parametrize(
    "q, expected",
    [
        # the plain mean
        (0.0, 1.19),
        # D = 1.9 and -5.7, h = 1.9^2 + 10 * 0.5 = 8.61 and 5.7^2 + 10 * 4.5 = 77.49:
        # 1 - (0.5 * 1.9 - 4.5 * 5.7) / 86.1
        (1.0, 1.286876),
        # h = 2 * 0.5 * 3.61 + 10 * 0.25 = 6.11 and 2 * 4.5 * 32.49 + 10 * 20.25 = 494.91
        (2.0, 1.229432),
    ],
)
def test_replies_count_by_their_loss(q, expected):
    assert combine(q) == pytest.approx(expected, abs=1e-6)


def test_equal_losses_leave_the_direction_of_the_plain_mean():
    for q in (0.5, 1.0, 3.0):
        # F^q (1.9 - 5.7) / (q F^(q - 1) (3.61 + 32.49) + 2 * 10 F^q), with F = 2
        step = 2**q * 3.8 / (q * 2 ** (q - 1) * 36.1 + 20 * 2**q)
        assert combine(q, (2.0, 2.0)) == pytest.approx(1 + step)


def test_a_device_without_loss_does_not_pull_and_without_any_the_model_stays():
    # only h of the device with a loss is left
    assert combine(2.0, (0.0, 4.5)) == pytest.approx(1 + 4.5**2 * 5.7 / 494.91)
    assert combine(20.0, (0.0, 0.0)) == pytest.approx(1.0, abs=1e-6)


def test_scalers_of_weights_count():
    # the second reply three times: (0.5 * 1.9 - 3 * 4.5 * 5.7) / (8.61 + 3 * 77.49)
    assert combine(1.0, weights=(0.25, 0.75)) == pytest.approx(1 - (0.95 - 76.95) / 241.08)


def test_all_devices_count_alike_whatever_their_size():
    # all logits are the same, so that every device has the loss log 8, and q = 0 is the plain mean
    sent, _, rows = one_weight([QFFL(0.0)], [[0], [4, 4, 4]], steps=lambda _: 2, start=1.0)
    assert sent == pytest.approx([1.19])
    assert rows[0]["qffl.loss"] == pytest.approx(log(8)) and rows[0]["qffl.largest_loss"] == pytest.approx(log(8))
    assert rows[0]["bytes_up"] == 2 * (8 + 4) and rows[0]["bytes_down"] == 2 * 8


def test_the_loss_is_that_of_the_received_model_on_all_samples_of_the_device():
    run, plain = toy(QFFL()), toy()
    received, (row,), (other,) = run.params, run.play(), plain.play()
    losses = []
    for device in (0, 1):
        batch = run.session.loop.host.setup.samples(device).take_all()
        logits = batch.inputs @ received["a.weight"].T + received["a.bias"]
        logits = logits.relu() @ received["b.weight"].T + received["b.bias"]
        losses.append(float(cross_entropy(logits, batch.targets[0][0])))
    assert row["qffl.loss"] == pytest.approx(sum(losses) / 2) and row["qffl.largest_loss"] == pytest.approx(max(losses))
    assert row["macs_work"] - other["macs_work"] == 8 * run.net.macs_forward, "a forward pass more over all samples"


@pytest.mark.parametrize("other", [Median(), FedDyn(), FedDrop()], ids=str)
def test_what_it_cannot_be_combined_with_is_refused(other):
    with pytest.raises(ShoalError, match="qffl"):
        compose([QFFL(), other])


@pytest.mark.parametrize("q", [-0.1, 21.0, float("nan")])
def test_values_out_of_range_are_refused(q):
    with pytest.raises(ValueError, match="needs"):
        QFFL(q)
