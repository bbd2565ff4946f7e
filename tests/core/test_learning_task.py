"""Learning tasks: losses and metrics with numbers worked out by hand."""

from dataclasses import replace
from functools import partial
from math import exp, isnan, log, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core import losses
from shoal.core.batch import Batch, Samples
from shoal.core.builtin_tasks import BINARY, CLASSIFY, MULTILABEL, REGRESS, TASKS, TOKENS
from shoal.core.errors import ShoalError
from shoal.core.learning_task import LearningTask
from shoal.core.library_metrics import LibraryMetric
from shoal.core.measures.evaluate import Evaluator
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.outputs import read_logits
from shoal.data.dataset import Dataset
from shoal.plugins.metrics import make_task_metrics

HALF, QUARTER = [log(1.0), log(1.0)], [log(1.0), log(3.0)]
"""Logits by which two classes have the probabilities 1/2 and 1/2, or 1/4 and 3/4."""


class Scaled(nn.Module):
    """Outputs that are the inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def judge(task: LearningTask, outputs: Any, targets: Any, *asked: str, classes: int = 0) -> dict[str, Any]:
    """What a task says of these outputs, by way of the evaluator, in chunks of two samples."""
    x, y = torch.tensor(outputs), torch.tensor(targets)
    net = Net(Scaled(), tuple(x.shape[1:]), x.shape[-1], task=task)
    dataset = Dataset("", x, y, x, y, x.shape[-1])
    metrics = make_task_metrics(task, asked, dataset, x.shape[-1], torch.float32)
    samples = Samples(x, y, torch.arange(len(y)))
    return Evaluator(samples, classes, asked, None, metrics, chunk=2)(net, net.initial)


# losses ---------------------------------------------------------------------------------------------------------------
def test_options_of_the_cross_entropy():
    logits, targets = torch.tensor([HALF, QUARTER]), torch.tensor([0, 1])
    plain = [log(2), log(4 / 3)]
    torch.testing.assert_close(losses.compute_cross_entropy(logits, targets), torch.tensor(plain))
    focal = losses.compute_cross_entropy(logits, targets, focal=2.0)
    torch.testing.assert_close(focal, torch.tensor([log(2) / 4, log(4 / 3) / 16]))
    weighted = losses.compute_cross_entropy(logits, targets, class_weights=(3.0, 0.5))
    torch.testing.assert_close(weighted, torch.tensor([3 * plain[0], plain[1] / 2]))
    smooth = losses.compute_cross_entropy(logits, targets, label_smoothing=0.2)
    torch.testing.assert_close(smooth, torch.tensor([log(2), 0.9 * log(4 / 3) + 0.1 * log(4)]))
    both = losses.compute_cross_entropy(logits, targets, label_smoothing=0.2, focal=1.0)
    torch.testing.assert_close(both, torch.tensor([log(2) / 2, (0.9 * log(4 / 3) + 0.1 * log(4)) / 4]))


def test_options_of_yes_and_no():
    """Logits 0 and -log 3: yes with the probability 1/2 and 1/4."""
    compute, outputs, targets = losses.compute_binary_cross_entropy, torch.tensor([0.0, -log(3)]), torch.tensor([1, 0])
    plain = [log(2), log(4 / 3)]
    torch.testing.assert_close(compute(outputs, targets), torch.tensor(plain))
    torch.testing.assert_close(
        compute(outputs[:, None], targets, focal=2.0), torch.tensor([log(2) / 4, log(4 / 3) / 16])
    )
    weighted = compute(outputs, targets, class_weights=(3.0, 0.5))
    torch.testing.assert_close(weighted, torch.tensor([plain[0] / 2, 3 * plain[1]]))
    smooth = compute(outputs, targets, label_smoothing=0.2)
    torch.testing.assert_close(smooth, torch.tensor([log(2), 0.9 * log(4 / 3) + 0.1 * log(4)]))
    # as torch has it where a logit stands for each of two classes
    both = losses.compute_cross_entropy(torch.stack((0 * outputs, outputs), 1), targets, label_smoothing=0.2, focal=1.5)
    torch.testing.assert_close(compute(outputs, targets, label_smoothing=0.2, focal=1.5), both)
    rows, labels = outputs.repeat(2, 1), torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    found = compute(rows, labels, yes_weights=(3.0, 0.5))
    torch.testing.assert_close(found, torch.tensor([(3 * log(2) + log(4) / 2) / 2, (log(2) + log(4 / 3)) / 2]))
    like = torch.nn.functional.binary_cross_entropy_with_logits
    torch.testing.assert_close(found.mean(), like(rows, labels, pos_weight=torch.tensor([3.0, 0.5])))


def test_positions_that_do_not_count():
    logits = torch.tensor([[HALF, QUARTER], [QUARTER, HALF]])
    targets = torch.tensor([[0, 1], [0, -100]])
    found = losses.compute_cross_entropy(logits, targets, skips_padding=True)
    torch.testing.assert_close(found, torch.tensor([(log(2) + log(4 / 3)) / 2, log(4)]))
    task = replace(TOKENS, skips_padding=True, loss=partial(TOKENS.loss, skips_padding=True))
    told = judge(task, logits.tolist(), targets.tolist(), "log_loss", classes=2)
    assert told["accuracy"] == pytest.approx(2 / 3)
    assert told["log_loss"] == pytest.approx((log(2) + log(4 / 3) + log(4)) / 3)


def test_losses_of_numbers_and_labels():
    outputs, targets = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert float(losses.compute_squared_error(outputs, targets)) == 5
    assert float(losses.compute_absolute_error(outputs, targets)) == 2
    assert float(losses.compute_huber_loss(outputs, targets)) == (0.5 + 2.5) / 2
    labels = losses.compute_binary_cross_entropy(torch.tensor([[0.0, log(3.0)]]), torch.tensor([[1.0, 0.0]]))
    assert float(labels) == pytest.approx((log(2) + log(4)) / 2)
    # a model may put out a column where targets are a list
    column = losses.compute_squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0]))
    assert column.tolist() == [1, 9]


def test_a_task_that_mixes_a_batch_is_told_what_only_pads_it():
    def count_others(outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return outputs[:, 0] * 0 + weight.sum()

    task = LearningTask("own", count_others, mixes_batch=True)
    x, y = torch.zeros(4, 1), torch.zeros(4)
    assert float(task.compute_mean_loss(x, Batch(x, ((y, None),)))) == 4
    assert float(task.compute_mean_loss(x, Batch(x, ((y, None),), torch.tensor([1.0, 1, 1, 0])))) == 3


# metrics --------------------------------------------------------------------------------------------------------------
def test_metrics_of_classes():
    # three samples of class 0, of which two are right, and one of class 1, which is right
    logits = [[2.0, 0.0], [1.0, 0.0], [0.0, 0.5], [0.0, 3.0]]
    found = judge(CLASSIFY, logits, [0, 0, 0, 1], "balanced_accuracy", "f1_macro", "f1_micro", "auroc", classes=2)
    assert found["accuracy"] == 0.75 and found["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["f1_macro"] == pytest.approx((2 * 2 / 5 + 2 * 1 / 3) / 2) and found["f1_micro"] == 0.75
    assert found["auroc"] == 1.0
    told = judge(CLASSIFY, logits, [0, 0, 0, 1], "confusion", "per_class", classes=2)
    assert told["confusion"] == [[2, 1], [0, 1]] and told["per_class"] == [pytest.approx(2 / 3), 1.0]
    assert "auroc" not in told


def test_probabilities_and_not_logits_are_ranked():
    # by the logit of class 0 the second sample would come first; by its probability it does not
    logits = [[1.0, 0.0], [3.0, 4.0]]
    assert judge(CLASSIFY, logits, [0, 1], "auroc", "average_precision", classes=2)["auroc"] == 1.0


def test_calibration_and_log_loss():
    # sure by 3/4 and right by half
    logits = [[0.0, log(3.0)]] * 4
    found = judge(CLASSIFY, logits, [1, 1, 0, 0], "calibration_error", "log_loss", classes=2)
    assert found["calibration_error"] == pytest.approx(0.25)
    assert found["log_loss"] == pytest.approx((log(4 / 3) + log(4)) / 2) == pytest.approx(found["loss"])


def test_metrics_of_yes_and_no():
    outputs = [[-2.0], [-1.0], [0.5], [3.0]]
    found = judge(BINARY, outputs, [0.0, 0.0, 0.0, 1.0], "auroc", "balanced_accuracy", "confusion", classes=2)
    assert (found["accuracy"], found["auroc"]) == (0.75, 1.0) and found["confusion"] == [[2, 1], [0, 1]]
    assert found["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    sigmoid = [1 / (1 + exp(-v)) for (v,) in outputs]
    expected = -(sum(log(1 - p) for p in sigmoid[:3]) + log(sigmoid[3])) / 4
    assert found["loss"] == pytest.approx(expected)


def test_metrics_of_labels():
    outputs = [[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]]
    found = judge(MULTILABEL, outputs, [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]], "f1_macro", "f1_micro")
    assert found["accuracy"] == pytest.approx(3 / 6)
    # label 0: two found of three; label 1: one too many, one missed
    assert found["f1_macro"] == pytest.approx((2 * 2 / 5 + 0) / 2)
    assert found["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 2))


def test_a_class_that_no_test_sample_has_is_left_out_of_means():
    """Of three classes the third is not tested; one of three samples of class 0 is taken for it."""
    logits = [[2.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.5], [0.0, 3.0, 0.0]]
    asked = ("balanced_accuracy", "auroc", "average_precision")
    found = judge(CLASSIFY, logits, [0, 0, 0, 1], *asked, classes=3)
    assert found["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["auroc"] == found["average_precision"] == pytest.approx(1.0)
    labels = judge(MULTILABEL, [[1.0, -1.0], [-1.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]], "auroc", "average_precision")
    assert labels["auroc"] == labels["average_precision"] == pytest.approx(1.0)


def test_where_nothing_can_be_ranked_there_is_no_number():
    asked = ("balanced_accuracy", "auroc", "average_precision")
    none = judge(BINARY, [[-2.0], [-1.0], [0.5], [3.0]], [0.0, 0.0, 0.0, 0.0], *asked, classes=2)
    assert isnan(none["auroc"]) and isnan(none["average_precision"]) and none["balanced_accuracy"] == 0.5
    every = judge(BINARY, [[-2.0], [3.0]], [1.0, 1.0], *asked, classes=2)
    assert isnan(every["auroc"]) and every["average_precision"] == 1.0 and every["balanced_accuracy"] == 0.5


def test_metrics_of_numbers():
    found = judge(REGRESS, [[1.0], [2.0], [6.0]], [1.0, 3.0, 4.0], "rmse", "r2")
    assert found["mae"] == pytest.approx(1.0) and found["loss"] == pytest.approx(5 / 3)
    assert found["rmse"] == pytest.approx(sqrt(5 / 3))
    assert found["r2"] == pytest.approx(1 - 5 / (42 / 9))  # the mean is 8 / 3
    rows = judge(REGRESS, [[1.0, 0.0], [2.0, 0.0], [6.0, 1.0]], [[1.0, 0], [3.0, 0], [4.0, 1]], "rmse", "r2")
    assert rows["mae"] == pytest.approx(0.5) and rows["rmse"] == pytest.approx(sqrt(5 / 6))
    assert rows["r2"] == pytest.approx((1 - 5 / (42 / 9) + 1) / 2)


def test_a_loss_that_mixes_a_batch_is_judged_over_the_whole_test_set():
    def compare_with_mean(outputs: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        return (outputs[:, 0] - outputs[:, 0].mean()) ** 2

    task = LearningTask("own", compare_with_mean, outputs=1, mixes_batch=True)
    assert judge(task, [[0.0], [0.0], [3.0], [3.0]], [0.0] * 4)["loss"] == pytest.approx(2.25)


def test_a_metric_of_the_users_own_is_given_predictions():
    task = LearningTask(
        "own",
        losses.compute_squared_error,
        (Metric("largest", "largest", better="down", make=lambda p, y: float(p.max())),),
        "largest",
        predict=lambda outputs: outputs * 10,
    )
    assert judge(task, [[0.25], [0.5]], [0.0, 0.0])["largest"] == 5.0


@pytest.mark.parametrize("name", TASKS)
def test_every_metric_of_a_task_gives_one_number(name):
    task, generator = TASKS[name], torch.Generator().manual_seed(0)
    outputs = torch.randn(40, 3, generator=generator)
    targets = {
        "classify": torch.arange(40) % 3,
        "tokens": (torch.arange(40) % 3)[:, None].expand(40, 2),
        "binary": (torch.arange(40) % 2).float(),
        "multilabel": (torch.randn(40, 3, generator=generator) > 0).float(),
        "regress": torch.randn(40, 3, generator=generator),
    }[name]
    outputs = outputs[:, :1] if name == "binary" else outputs[:, None].expand(40, 2, 3) if name == "tokens" else outputs
    library = [m.name for m in task.metrics if isinstance(m.make, LibraryMetric)]
    found = judge(task, outputs.tolist(), targets.tolist(), *library, classes=3)
    assert set(library) <= found.keys() and all(isinstance(found[n], float) for n in library)
    assert set(task.columns) <= found.keys()


def test_what_a_headline_must_be():
    for headline, words in (("c_index", "which it has not"), ("top", "only where asked"), ("flat", "no direction")):
        metrics = (Metric("top", "top", better="up", asked="top"), Metric("flat", "flat"))
        with pytest.raises(ShoalError, match=words):
            LearningTask("own", losses.compute_squared_error, metrics, headline)


# outputs --------------------------------------------------------------------------------------------------------------
class Answer:
    def __init__(self, logits: Tensor):
        self.logits = logits


def test_outputs_in_a_dict_or_an_object():
    logits = torch.ones(2, 3)
    assert read_logits(logits) is logits
    assert read_logits({"loss": torch.zeros(()), "logits": logits}) is logits
    assert read_logits({"score": logits}) is logits
    assert read_logits(Answer(logits)) is logits
    with pytest.raises(TypeError, match="a dict with a, b and no tensor"):
        read_logits({"a": logits, "b": logits})
    with pytest.raises(TypeError, match="nothing and no tensor"):
        read_logits(None)
