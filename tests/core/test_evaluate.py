"""What is told about a model: top-1, top-3, perplexity, per class, per device, and a user's own metric."""

from dataclasses import replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.batch import Samples
from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.measures.evaluate import Evaluator, compute_device_accuracy, summarise_device_accuracy
from shoal.core.metric import COLUMNS, METRICS, Metric, is_among_likeliest
from shoal.core.model.net import Net

TINY: dict[str, Any] = dict(devices=6, sample=3, rounds=2, batch=64)


class Table(nn.Module):
    """Logits that are simply the inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def judged(
    logits: list[list[float]], targets: list[int], *metrics: str, task: LearningTask = CLASSIFY, **more
) -> dict[str, Any]:
    x = torch.tensor(logits)
    net = Net(Table(), (x.shape[1],), x.shape[1], task=task)
    samples = Samples(x, torch.tensor(targets), torch.arange(len(targets)))
    return Evaluator(samples, x.shape[1], metrics, **more)(net, net.initial)


LOGITS = [[4.0, 3, 2, 1], [4.0, 3, 2, 1], [4.0, 3, 2, 1], [1.0, 2, 3, 4]]


def test_top1_and_top3():
    found = judged(LOGITS, [0, 2, 3, 3], "top3")
    assert found["accuracy"] == 0.5 and found["top3"] == 0.75
    assert "top3" not in judged(LOGITS, [0, 2, 3, 3])


def test_a_metric_that_says_how_it_judges_needs_nothing_else():
    top2 = Metric("top2", "top-2 accuracy", "share", "up", asked="top2", judge=partial(is_among_likeliest, 2))
    task = replace(CLASSIFY, metrics=(*CLASSIFY.metrics, top2))
    found = judged(LOGITS, [0, 2, 3, 2], "top2", "top3", task=task)
    assert (found["accuracy"], found["top2"], found["top3"]) == (0.25, 0.5, 0.75)
    assert "top2" not in judged(LOGITS, [0, 2, 3, 2], "top3", task=task)


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
    values = compute_device_accuracy(labels, right, total)
    assert values[:3].tolist() == [1.0, 0.5, 0.75] and np.isnan(values[3])
    found = judged(LOGITS, [0, 0, 3, 3], "devices", labels=labels)
    assert found["device_mean"] == 0.75 and found["device_worst"] == 0.5
    assert found["device_spread"] == pytest.approx(np.std([1.0, 0.5, 0.75]))


def test_the_worst_tenth():
    assert summarise_device_accuracy(np.arange(30) / 100)["device_worst"] == pytest.approx(0.01)


def test_sequences_are_judged_by_position():
    logits = torch.tensor([[[5.0, 0, 0], [0, 5.0, 0]], [[0, 0, 5.0], [0, 0, 5.0]]])
    net = Net(Table(), (2, 3), 3)
    samples = Samples(logits, torch.tensor([[0, 1], [2, 0]]), torch.arange(2))
    found = Evaluator(samples, 3, ("per_class",), chunk=1)(net, net.initial)
    assert found["accuracy"] == 0.75 and found["per_class"] == [0.5, 1.0, 1.0]


def test_metrics_of_a_run_are_in_its_history():
    history = shoal.run(metrics=("top3", "perplexity", "per_class", "devices"), **TINY).history
    row = history.rows[-1]
    assert row["accuracy"] <= row["top3"] <= 1 and row["perplexity"] == pytest.approx(exp(row["loss"]))
    assert len(row["per_class"]) == 10 and 0 <= row["device_worst"] <= row["device_mean"] <= 1


OWN = """
import numpy as np
import torch

def f1(logits, targets):
    found, scores = logits.argmax(-1), []
    for c in range(logits.shape[-1]):
        both = float(((found == c) & (targets == c)).sum())
        either = float((found == c).sum() + (targets == c).sum())
        scores.append(2 * both / either if either else 0.0)
    return sum(scores) / len(scores)

def auc(logits, targets):
    score, positive = logits[:, 1] - logits[:, 0], targets == 1
    wins = (score[positive][:, None] > score[~positive]).double() + 0.5 * (score[positive][:, None] == score[~positive])
    return wins.mean()

class F1:
    def __init__(self, num_classes):
        self.counts = torch.zeros(3, num_classes)

    def update(self, logits, targets):
        found, classes = logits.argmax(-1), self.counts.shape[1]
        self.counts[0] += torch.bincount(found[found == targets], minlength=classes)
        self.counts[1] += torch.bincount(found, minlength=classes)
        self.counts[2] += torch.bincount(targets, minlength=classes)

    def compute(self):
        return (2 * self.counts[0] / (self.counts[1] + self.counts[2]).clamp(min=1)).mean()

def made_f1():
    return F1(2)

kept_f1 = F1(2)

class Resettable(F1):
    def __init__(self):
        super().__init__(2)

    def reset(self):
        self.counts.zero_()

reset_f1 = Resettable()

class Pieces:
    def __init__(self):
        self.largest = 0

    def update(self, logits, targets):
        self.largest = max(self.largest, len(logits))

    def compute(self):
        return self.largest

def samples(logits, targets):
    assert len(logits) == len(targets)
    return len(logits)

def vandal(logits, targets):
    logits.zero_(), targets.zero_()
    return 0

def none(logits, targets):
    return None

def several(logits, targets):
    return logits.mean(0)

def text(logits, targets):
    return "0.5"

def raises(logits, targets):
    raise ValueError("no luck")

def nan(logits, targets):
    return float("nan")

def three(logits, targets, average):
    return 1.0

def nothing():
    return 1.0

number = 3
accuracy = loss = devices = f1
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return lambda *names: tuple(f"{tmp_path}/mine.py:{name}" for name in names)


SORTED: dict[str, Any] = dict(devices=6, sample=3, rounds=4, batch=8, epochs="3", split="iid")


def sorted_by_class(samples: int = 1400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two overlapping classes; the test half has all of class 0 first, and more of it than fits into a chunk."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(samples) % 4 // 3
    x = torch.randn(samples, 3, generator=generator) + y[:, None]
    order = y.argsort(stable=True)
    return x[:200], y[:200], x[order], y[order]


def by_hand(module: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """F1 from the confusion matrix, and the area under the curve from ranks (Mann and Whitney), in numpy."""
    with torch.no_grad():
        logits, targets = module(x).numpy(), y.numpy()
    matrix = np.zeros((2, 2))
    np.add.at(matrix, (targets, logits.argmax(1)), 1)
    f1 = np.mean(2 * np.diag(matrix) / (matrix.sum(0) + matrix.sum(1)))
    score = logits[:, 1].astype(float) - logits[:, 0]
    ranks = np.searchsorted(np.sort(score), score, "left") + np.searchsorted(np.sort(score), score, "right") + 1
    positive = targets == 1
    above = ranks[positive].sum() / 2 - positive.sum() * (positive.sum() + 1) / 2
    return float(f1), float(above / (positive.sum() * (~positive).sum()))


def test_own_metrics_are_those_of_the_whole_test_set(own):
    data = sorted_by_class()
    names = ("f1", "auc", "F1", "made_f1", "kept_f1", "reset_f1", "samples", "Pieces")
    result = shoal.run(data=data, metrics=own(*names), **SORTED)
    f1, auc = by_hand(result.module(), *data[2:])
    row = result.history.rows[-1]
    assert row["auc"] == pytest.approx(auc, abs=1e-6) and 0.6 < f1 < auc < 0.99
    assert {name: row[name] for name in names if name.lower().endswith("f1")} == {
        name: pytest.approx(f1, abs=1e-6) for name in ("f1", "F1", "made_f1", "kept_f1", "reset_f1")
    }
    assert row["samples"] == 1400 and row["Pieces"] <= 512


def test_a_metric_that_overwrites_what_it_is_given_harms_no_other(own):
    row = shoal.run(data=sorted_by_class(), metrics=own("vandal", "samples", "f1"), **SORTED).history.rows[-1]
    alone = shoal.run(data=sorted_by_class(), metrics=own("f1"), **SORTED).history.rows[-1]
    assert row["f1"] == alone["f1"] and row["accuracy"] == alone["accuracy"]


@pytest.mark.parametrize("engine", ["batched", "pool"])
def test_own_metrics_do_not_depend_on_the_engine(own, engine):
    rows = [
        shoal.run(data=sorted_by_class(), metrics=own("auc", "F1"), engine=e, **SORTED).history.rows[-1]
        for e in ("serial", engine)
    ]
    assert [rows[1][k] for k in ("auc", "F1")] == pytest.approx([rows[0][k] for k in ("auc", "F1")], abs=1e-5)


def test_own_metrics_in_a_comparison_of_several_processes(own):
    both = shoal.compare(["fedavg", "fedprox"], metrics=own("f1", "Pieces"), workers=2, engine="serial", **TINY)
    alone = shoal.run("fedprox", metrics=own("f1"), engine="serial", **TINY)
    assert both.results["fedprox"][0].history["f1"] == alone.history["f1"]


@pytest.mark.parametrize(
    "name, words",
    [
        ("none", "it gives nothing and not a number"),
        ("several", "it gives 10 values and not a number"),
        ("text", "it gives the text '0.5' and not a number"),
        ("raises", "it raises ValueError: no luck in line"),
        ("three", r"it takes \(logits, targets, average\)"),
        ("nothing", "it makes something of type float, which has no `update` and `compute`"),
        ("number", "it is something of type int"),
        ("accuracy", "the history has a column of that name"),
    ],
)
def test_own_metrics_that_cannot_be_used(own, name, words):
    with pytest.raises(ShoalError, match=f"mine.py:{name} cannot be used: {words}") as error:
        shoal.run(metrics=own(name), **TINY)
    assert error.value.kind.name == "bad-part"


def test_a_metric_that_is_not_defined_is_told_once_and_leaves_a_gap(own, caplog):
    history = shoal.run(metrics=own("nan", "f1"), **TINY).history
    assert history["nan"] == [None, None] and all(history["f1"])
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1 and "gives nan, which is no number" in told[0]


def test_the_metrics_of_the_guide(tmp_path):
    guide = (Path(__file__).parents[2] / "docs/how-to/recipes.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(guide.split("## A metric of your own")[1].split("```python\n")[1].split("```")[0])
    data = sorted_by_class()
    metrics = (f"{tmp_path}/mine.py:f1", f"{tmp_path}/mine.py:Entropy")
    result = shoal.run(data=data, metrics=metrics, **SORTED)
    with torch.no_grad():
        p = result.module()(data[2]).softmax(-1).double()
    row = result.history.rows[-1]
    assert row["f1"] == pytest.approx(by_hand(result.module(), *data[2:])[0], abs=1e-6)
    assert row["Entropy"] == pytest.approx(float(-(p * p.log()).sum(1).mean()), abs=1e-5)


def test_two_metrics_of_one_name(own, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text(OWN)
    with pytest.raises(ShoalError, match="another metric has that name"):
        shoal.run(metrics=(*own("f1"), f"{tmp_path}/other/mine.py:f1"), **TINY)


def test_no_metric_can_take_the_place_of_a_column():
    asked = ("top3", "perplexity", "per_class", "devices", "local", "class_kl")
    columns = set(shoal.run("fedmp", metrics=asked, fleet="5g", failures=0.5, **TINY).history.to_dict())
    assert columns <= {*METRICS, *COLUMNS}


def test_logits_that_are_too_large_to_keep_are_told_of_before_anything_is_trained(own, tmp_path):
    words = torch.arange(70_000).reshape(7_000, 10) % 9_000
    model, out = nn.Sequential(nn.Embedding(9_000, 2), nn.Linear(2, 9_000)), tmp_path / "x"
    recipe: dict[str, Any] = dict(data=(words, words, words, words), model=model, split="iid", out=str(out), **TINY)
    with pytest.raises(ShoalError, match="7000 test samples take 2.3 GiB, more than the 2 GiB") as error:
        shoal.run(metrics=own("samples"), **recipe)
    assert "update(logits, targets) and compute()" in error.value.advice and not out.exists()


def test_metrics_that_are_not_there(tmp_path):
    with pytest.raises(ShoalError, match="top3"):
        shoal.run(metrics=("top4",), **TINY)
    Path(tmp_path / "mine.py").write_text("def one(logits, targets):\n    return 1.0\n")
    with pytest.raises(ShoalError, match="It has one"):
        shoal.run(metrics=(f"{tmp_path}/mine.py:two",), **TINY)
    with pytest.raises(ShoalError, match="There is no file"):
        shoal.run(metrics=(f"{tmp_path}/yours.py:two",), **TINY)
