"""Metrics of a model on a test set: its task's, those that say how they judge, by class and by device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.measures.forward_pass import compute_outputs
from shoal.core.metric import ON_ONE_HALF
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.streams import seed_generator


class StreamingMetric(Protocol):
    """A metric with the interface of torchmetrics: updated chunk by chunk, computed at the end."""

    def update(self, logits: Tensor, targets: Tensor, /) -> Any: ...

    def compute(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Computes what a net's task is judged by on a test set, and the further metrics that are named."""

    samples: Samples
    classes: int
    """How many classes targets have; 0 where they are none."""
    metrics: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    """Devices x classes: how many training samples of each class a device holds."""
    custom_metrics: Mapping[str, Callable[[], StreamingMetric]] = field(default_factory=dict)
    """The metrics of the task that are no means, and the user's own, by name; each evaluation makes new ones."""
    chunk: int = 0
    """Samples in one forward pass; 0: a number that suits the compute device."""

    def __call__(self, net: Net, params: Params) -> dict[str, Any]:
        custom = {name: make() for name, make in self.custom_metrics.items()}
        metrics = self.run_test_pass(net, params, list(custom.values()))
        right, total, confusion = metrics.pop("right"), metrics.pop("total"), metrics.pop("confusion", None)
        if confusion is not None:
            metrics["confusion"] = confusion.long().tolist()
        if "perplexity" in self.metrics:
            metrics["perplexity"] = exp(min(metrics.get("log_loss", metrics["loss"]), 700.0))
        if "per_class" in self.metrics:
            metrics["per_class"] = [float(r / t) if t else None for r, t in zip(right, total)]
        if "devices" in self.metrics and self.labels is not None:
            metrics |= summarise_device_accuracy(compute_device_accuracy(self.labels, right, total))
        return metrics | {name: metric.compute() for name, metric in custom.items()}

    def evaluate_per_device(self, net: Net, params: Params) -> list[float | None]:
        """The accuracy re-weighted to each device's labels; None for a device that holds none of the tested classes."""
        if self.labels is None:
            return []
        counts = self.run_test_pass(net, params)
        values = compute_device_accuracy(self.labels, counts["right"], counts["total"])
        return [None if np.isnan(v) else float(v) for v in values]

    @torch.no_grad()
    def run_test_pass(self, net: Net, params: Params, custom: Sequence[StreamingMetric] = ()) -> dict[str, Any]:
        """Loss, means over targets, and by class the numbers of right (`right`) and of all (`total`) predictions.

        Metrics in `custom` are updated with outputs and targets on the CPU.
        """
        task = net.task
        judges = {m.name: m.judge for m in task.metrics if m.judge and (not m.asked or m.asked in self.metrics)}
        classes = self.classes if task.predict_classes else 0
        cells = classes if "confusion" in self.metrics else 0
        sizes = (classes, classes, 1, len(judges), cells * cells)
        sums = torch.zeros(sum(sizes), dtype=torch.float64, device=net.place)
        right, total, loss, judged, confusion = sums.split(sizes)
        judgements = 0
        for rows in self.samples.index.split(self.chunk or choose_chunk_size(self.samples, net)):
            batch = self.samples.take_batch(rows)
            with seed_generator(0, net.place):  # for models that draw random numbers here, too
                outputs, targets = compute_outputs(net, params, batch.inputs), batch.targets[0][0]
            judgements += targets.numel()
            if task.predict_classes:
                found, labels = task.predict_classes(outputs), targets.long()
                if task.skips_padding:
                    found, labels = found[labels >= 0], labels[labels >= 0]
                hit = found == labels
                total.index_add_(0, labels.flatten(), torch.ones_like(hit, dtype=sums.dtype).flatten())
                right.index_add_(0, labels.flatten(), hit.to(sums.dtype).flatten())
                if cells:
                    at = (labels * cells + found).flatten()
                    confusion.index_add_(0, at, torch.ones_like(at, dtype=sums.dtype))
            loss += task.compute_sample_losses(outputs, targets).double().sum()
            for place, judge in enumerate(judges.values()):
                judged[place] += judge(outputs, targets).sum(dtype=sums.dtype)
            shown = (outputs.cpu(), targets.cpu()) if custom else ()
            for metric in custom:
                metric.update(*shown)
        right, total, loss, judged, confusion = sums.cpu().split(sizes)  # the only wait for a GPU
        positions, samples = max(float(total.sum()) if classes else judgements, 1.0), max(len(self.samples), 1)
        metrics: dict[str, Any] = {"accuracy": float(right.sum()) / positions} if classes else {}
        metrics |= {"loss": float(loss) / samples, "right": right, "total": total}
        metrics |= {"confusion": confusion.reshape(cells, cells)} if cells else {}
        return metrics | {name: value / positions for name, value in zip(judges, judged.tolist())}


@dataclass(frozen=True, eq=False)
class EvaluatorOfBothHalves:
    """Judges on validation samples, and on the test half in columns `test_NAME`, by which nothing is chosen."""

    validation: Evaluator
    test: Evaluator

    def __call__(self, net: Net, params: Params) -> dict[str, Any]:
        metrics = replace(self.test, metrics=tuple(m for m in self.test.metrics if m not in ON_ONE_HALF))
        tested = {f"test_{name}": value for name, value in metrics(net, params).items()}
        return self.validation(net, params) | tested


def choose_chunk_size(samples: Samples, net: Net) -> int:
    """Samples per forward pass: 512 on a CPU, for its caches; on a GPU as many as have about 8 M input elements."""
    if net.place.type == "cpu":
        return 512
    elements = max(1, sum(t[0].numel() for t in tree.collect_tensors(samples.inputs) if len(t)))
    return min(8192, max(256, 2**23 // elements))


def compute_device_accuracy(labels: np.ndarray, right: Tensor, total: Tensor) -> np.ndarray:
    """One number per device: accuracy by class, weighted by its labels, without classes that are not tested; or NaN."""
    tested = total.numpy() > 0
    accuracy = np.where(tested, right.numpy() / np.maximum(total.numpy(), 1), 0)
    tested_labels = labels * tested
    size = tested_labels.sum(1)
    return np.where(size > 0, (tested_labels @ accuracy) / np.maximum(size, 1), np.nan)


def summarise_device_accuracy(values: np.ndarray) -> dict[str, float]:
    """Mean, mean of the worst tenth, and standard deviation of accuracy over devices."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return {}
    worst = known[: max(1, len(known) // 10)]
    return {
        "device_mean": float(known.mean()),
        "device_worst": float(worst.mean()),
        "device_spread": float(known.std()),
    }
