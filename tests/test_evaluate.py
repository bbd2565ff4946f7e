"""What is told about a model: top-1, top-3, perplexity, per class, per device, and a user's own metric."""

from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.errors import ShoalError
from shoal.core.evaluate import Judge, by_device, spread
from shoal.core.net import Net
from shoal.core.types import Samples

TINY: dict[str, Any] = dict(devices=6, sample=3, rounds=2, batch=64)


class Table(nn.Module):
    """Logits that are simply the inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def judged(logits: list[list[float]], targets: list[int], *metrics: str, **more) -> dict[str, Any]:
    x = torch.tensor(logits)
    net = Net(Table(), (x.shape[1],), x.shape[1])
    samples = Samples(x, torch.tensor(targets), torch.arange(len(targets)))
    return Judge(samples, x.shape[1], metrics, **more)(net, net.initial)


LOGITS = [[4.0, 3, 2, 1], [4.0, 3, 2, 1], [4.0, 3, 2, 1], [1.0, 2, 3, 4]]


def test_top1_and_top3():
    found = judged(LOGITS, [0, 2, 3, 3], "top3")
    assert found["accuracy"] == 0.5 and found["top3"] == 0.75
    assert "top3" not in judged(LOGITS, [0, 2, 3, 3])


def test_loss_and_perplexity():
    found = judged([[0.0, 0.0], [log(3), 0.0]], [0, 0], "perplexity")
    assert found["loss"] == pytest.approx((log(2) + log(4 / 3)) / 2)
    assert found["perplexity"] == pytest.approx(exp(found["loss"]))


def test_per_class():
    assert judged(LOGITS, [0, 0, 3, 3], "per_class")["per_class"] == [1.0, None, None, 0.5]


def test_a_device_is_judged_on_its_own_mix_of_labels():
    # class 0 is always right, class 3 half of the time, the others are not tested
    labels = np.array([[10, 0, 0, 0], [0, 0, 0, 7], [1, 5, 0, 1], [0, 9, 0, 0]])
    right, total = torch.tensor([2.0, 0, 0, 1]), torch.tensor([2.0, 0, 0, 2])
    values = by_device(labels, right, total)
    assert values[:3].tolist() == [1.0, 0.5, 0.75] and np.isnan(values[3])
    found = judged(LOGITS, [0, 0, 3, 3], "devices", labels=labels)
    assert found["device_mean"] == 0.75 and found["device_worst"] == 0.5
    assert found["device_spread"] == pytest.approx(np.std([1.0, 0.5, 0.75]))


def test_the_worst_tenth():
    assert spread(np.arange(30) / 100)["device_worst"] == pytest.approx(0.01)


def test_sequences_are_judged_by_position():
    logits = torch.tensor([[[5.0, 0, 0], [0, 5.0, 0]], [[0, 0, 5.0], [0, 0, 5.0]]])
    net = Net(Table(), (2, 3), 3)
    samples = Samples(logits, torch.tensor([[0, 1], [2, 0]]), torch.arange(2))
    found = Judge(samples, 3, ("per_class",), chunk=1)(net, net.initial)
    assert found["accuracy"] == 0.75 and found["per_class"] == [0.5, 1.0, 1.0]


def test_metrics_of_a_run_are_in_its_history():
    history = shoal.run(metrics=("top3", "perplexity", "per_class", "devices"), **TINY).history
    row = history.rows[-1]
    assert row["accuracy"] <= row["top3"] <= 1 and row["perplexity"] == pytest.approx(exp(row["loss"]))
    assert len(row["per_class"]) == 10 and 0 <= row["device_worst"] <= row["device_mean"] <= 1


def test_a_metric_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def confidence(logits, targets):\n    return logits.softmax(-1).max(-1).values.mean()\n"
    )
    row = shoal.run(metrics=(f"{tmp_path}/mine.py:confidence",), **TINY).history.rows[-1]
    assert 0.1 <= row["confidence"] <= 1


def test_metrics_that_are_not_there(tmp_path):
    with pytest.raises(ShoalError, match="top3"):
        shoal.run(metrics=("top4",), **TINY)
    Path(tmp_path / "mine.py").write_text("def one(logits, targets):\n    return 1.0\n")
    with pytest.raises(ShoalError, match="It has one"):
        shoal.run(metrics=(f"{tmp_path}/mine.py:two",), **TINY)
    with pytest.raises(ShoalError, match="There is no file"):
        shoal.run(metrics=(f"{tmp_path}/yours.py:two",), **TINY)
