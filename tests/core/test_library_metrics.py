"""Metrics of torchmetrics: means over classes are over those that the samples have."""

import pytest
import torch

from shoal.core.builtin_tasks import BINARY, CLASSIFY, MULTILABEL
from shoal.core.learning_task import LearningTask

pytest.importorskip("torchmetrics")


def measure(task: LearningTask, name: str, outputs: torch.Tensor, targets: torch.Tensor, pieces: int = 3) -> float:
    metric = next(metric for metric in task.metrics if metric.name == name)
    assert metric.make is not None
    made = metric.make(outputs.shape[1])
    for some, own in zip(outputs.chunk(pieces), targets.chunk(pieces)):
        made.update(task.predict(some), own)
    return made.compute()


def compute_area(scores: torch.Tensor, there: torch.Tensor) -> float:
    """The share of pairs of a sample with the label and one without that the scores put in order."""
    return float((scores[there][:, None] > scores[~there][None]).double().mean())


@pytest.mark.parametrize("classes", [[0, 1, 2, 3, 4], [1, 2, 3], [4, 0]])
def test_classes_that_no_sample_has_are_not_counted_as_0(classes):
    """Such as class 0 where labels begin at 1, or classes that only few samples have."""
    torch.manual_seed(0)
    targets, outputs = torch.tensor(classes).repeat(40), torch.randn(40 * len(classes), 5)
    recalls = [float((outputs[targets == c].argmax(1) == c).double().mean()) for c in classes]
    areas = [compute_area(outputs.softmax(1)[:, c], targets == c) for c in classes]
    assert measure(CLASSIFY, "balanced_accuracy", outputs, targets) == pytest.approx(sum(recalls) / len(classes))
    assert measure(CLASSIFY, "auroc", outputs, targets) == pytest.approx(sum(areas) / len(classes))


def test_labels_that_no_sample_has_or_all_have_are_not_counted_as_0():
    torch.manual_seed(0)
    targets, outputs = torch.randint(0, 2, (60, 4)), torch.randn(60, 4)
    targets[:, 1], targets[:, 3] = 0, 1
    areas = [compute_area(outputs[:, label], targets[:, label] > 0) for label in (0, 2)]
    assert measure(MULTILABEL, "auroc", outputs, targets) == pytest.approx(sum(areas) / 2)


def test_one_half_is_no_for_every_metric():
    outputs, targets = torch.zeros(10, 1), torch.tensor([0.0, 0.0, 1.0] * 3 + [0.0])
    assert measure(BINARY, "balanced_accuracy", outputs, targets) == 0.5
    assert measure(BINARY, "f1_micro", outputs, targets) == pytest.approx(0.7)
