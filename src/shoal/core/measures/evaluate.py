"""How good a model is on a test set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.local.step import compute_sample_losses
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.types import Samples

TEST_METRICS = {
    "top3": "the share of samples whose class is among the three likeliest",
    "perplexity": "e to the mean loss",
    "per_class": "the accuracy on each class",
    "devices": "the accuracy on the test set re-weighted to each device's labels: mean, worst tenth, spread",
}


class Metric(Protocol):
    """What is computed from a test set that comes in pieces, in the form of torchmetrics."""

    def update(self, logits: Tensor, targets: Tensor, /) -> Any: ...

    def compute(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Accuracy and mean loss over all samples of a test set, and whatever else is asked for."""

    samples: Samples
    classes: int
    metrics: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    """Devices x classes: how many samples of each class a device holds."""
    own: Mapping[str, Callable[[], Metric]] = field(default_factory=dict)
    """What makes the user's own metrics, by name: one for each evaluation."""
    chunk: int = 0
    """Samples in one pass; 0: as many as a GPU likes, or as fit into the caches of a processor."""

    def __call__(self, net: Net, params: Params) -> dict[str, Any]:
        own = {name: make() for name, make in self.own.items()}
        found = self.run_test_pass(net, params, list(own.values()))
        right, total = found.pop("right"), found.pop("total")
        if "perplexity" in self.metrics:
            found["perplexity"] = exp(min(found["loss"], 700.0))
        if "per_class" in self.metrics:
            found["per_class"] = [float(r / t) if t else None for r, t in zip(right, total)]
        if "devices" in self.metrics and self.labels is not None:
            found |= summarise_device_accuracy(compute_device_accuracy(self.labels, right, total))
        return found | {name: metric.compute() for name, metric in own.items()}

    def evaluate_per_device(self, net: Net, params: Params) -> list[float | None]:
        """The accuracy for each device's mix of labels; None for a device that holds none of the tested classes."""
        if self.labels is None:
            return []
        found = self.run_test_pass(net, params)
        values = compute_device_accuracy(self.labels, found["right"], found["total"])
        return [None if np.isnan(v) else float(v) for v in values]

    @torch.no_grad()
    def run_test_pass(self, net: Net, params: Params, own: Sequence[Metric] = ()) -> dict[str, Any]:
        """One pass over the test set; the user's own metrics are shown it in main memory."""
        sums = torch.zeros(2 * self.classes + 2, dtype=torch.float64, device=net.place)
        right, total, loss, top3 = sums.split((self.classes, self.classes, 1, 1))
        for rows in self.samples.index.split(self.chunk or choose_chunk_size(self.samples, net)):
            batch = self.samples.take_batch(rows)
            logits, targets = net.forward(params, batch.inputs)[0], batch.targets[0][0]
            hit = logits.argmax(-1) == targets
            total.index_add_(0, targets.flatten(), torch.ones_like(hit, dtype=sums.dtype).flatten())
            right.index_add_(0, targets.flatten(), hit.to(sums.dtype).flatten())
            loss += compute_sample_losses(logits, targets).double().sum()
            if "top3" in self.metrics:
                best = logits.topk(min(3, logits.shape[-1]), -1).indices
                top3 += (best == targets.unsqueeze(-1)).any(-1).sum()
            seen = (logits.cpu(), targets.cpu()) if own else ()
            for metric in own:
                metric.update(*seen)
        right, total, loss, top3 = sums.cpu().split((self.classes, self.classes, 1, 1))  # the only wait for a GPU
        positions, samples = max(float(total.sum()), 1.0), max(len(self.samples), 1)
        found = {"accuracy": float(right.sum()) / positions, "loss": float(loss) / samples}
        found |= {"right": right, "total": total}
        return found | ({"top3": float(top3) / positions} if "top3" in self.metrics else {})


def choose_chunk_size(samples: Samples, net: Net) -> int:
    """How many samples make a good pass."""
    if net.place.type == "cpu":
        return 512
    numbers = max(1, samples.inputs[0].numel() if len(samples.inputs) else 1)
    return min(8192, max(256, 2**23 // numbers))


def compute_device_accuracy(labels: np.ndarray, right: Tensor, total: Tensor) -> np.ndarray:
    """The accuracy on each class, weighted as a device holds them; classes that are not tested are left out."""
    tested = total.numpy() > 0
    accuracy = np.where(tested, right.numpy() / np.maximum(total.numpy(), 1), 0)
    held = labels * tested
    size = held.sum(1)
    return np.where(size > 0, (held @ accuracy) / np.maximum(size, 1), np.nan)


def summarise_device_accuracy(values: np.ndarray) -> dict[str, float]:
    """Mean, mean of the worst tenth, and standard deviation over devices."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return {}
    worst = known[: max(1, len(known) // 10)]
    return {
        "device_mean": float(known.mean()),
        "device_worst": float(worst.mean()),
        "device_spread": float(known.std()),
    }
