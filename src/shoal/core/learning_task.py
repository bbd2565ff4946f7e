"""A learning task: the loss of a sample, how a model's outputs are read, and the metrics that judge a model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.core.metric import COLUMNS, METRICS, Metric
from shoal.core.short_repr import make_short_repr

if TYPE_CHECKING:
    from shoal.core.batch import Batch


def keep_outputs(outputs: Tensor) -> Tensor:
    """The outputs themselves, where they are what metrics are about."""
    return outputs


@dataclass(frozen=True, eq=False)
class LearningTask:
    """What a model learns. Every net has one, and so parts, engines and the evaluation know the loss by `net.task`."""

    name: str
    loss: Callable[..., Tensor]
    """(outputs, targets) -> the loss of each sample; with `mixes_batch`, (outputs, targets, weight)."""
    metrics: tuple[Metric, ...] = ()
    """What a model is judged by beside the loss; those without a word in `asked` are always measured."""
    headline: str = "loss"
    """The metric that targets, budgets, tables and the report are about; its `better` says which way is better."""
    outputs: int = 0
    """How many numbers a model puts out for a sample; 0: as many as the data have classes or columns of targets."""
    predict: Callable[[Tensor], Tensor] = keep_outputs
    """Outputs -> predictions, which metrics that `make` something are given: probabilities, or numbers."""
    predict_classes: Callable[[Tensor], Tensor] | None = None
    """Outputs -> the number of the class of each target; None where targets are no classes."""
    has_class_logits: bool = False
    """Whether outputs are one logit for each class; parts that say `needs_class_logits` are refused elsewhere."""
    mixes_batch: bool = False
    """Whether a sample's loss depends on the rest of its batch; `weight` is then 0 for what only pads a batch."""
    skips_padding: bool = False
    """Whether targets below 0 do not count."""
    about: str = ""
    """What it is for, in a sentence that a table can show."""

    def __repr__(self) -> str:
        return make_short_repr(self)

    def __post_init__(self):
        names = [metric.name for metric in self.metrics]
        if "loss" not in names:
            object.__setattr__(self, "metrics", (*self.metrics, METRICS["loss"]))
        metric = next((m for m in self.metrics if m.name == self.headline), None)
        if metric is None or not metric.better or metric.asked:
            why = "has not" if metric is None else "measures only where asked" if metric.asked else "gives no direction"
            problem = f"The task {self.name} has the headline {self.headline}, which it {why}."
            raise ShoalError("bad-value", problem, 'List it in `metrics`: Metric("c_index", "C-index", better="up").')

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The metrics that every row has, the headline first, then the loss."""
        measured = (m.name for m in self.metrics if not m.asked)
        return tuple(dict.fromkeys((self.headline, "loss", *measured)))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words of `--metrics` that this task knows."""
        by_class = [column.asked for column in COLUMNS.values() if column.asked and self.predict_classes]
        return tuple(dict.fromkeys([*(m.asked for m in self.metrics if m.asked), *by_class]))

    def compute_sample_losses(self, outputs: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """The loss of each sample; `weight` is 0 for padding, and matters where the task mixes a batch."""
        if self.mixes_batch:
            weight = torch.ones(len(outputs), dtype=outputs.dtype, device=outputs.device) if weight is None else weight
            return self.loss(outputs, targets, weight)
        return self.loss(outputs, targets)

    def compute_mean_loss(self, outputs: Tensor, batch: "Batch") -> Tensor:
        """The batch mean of the loss, summed over the lists of targets with their weights (Mixup has two)."""
        total = torch.zeros((), dtype=outputs.dtype, device=outputs.device) if len(batch.targets) > 1 else None
        for targets, weight in batch.targets:
            losses = self.compute_sample_losses(outputs, targets, batch.weight)
            loss = batch.mean(losses if weight is None else losses * weight)
            total = loss if total is None else total + loss
        assert total is not None
        return total
