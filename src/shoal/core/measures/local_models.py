"""Metrics of local models, as devices return them, before they are aggregated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.batch import Samples
from shoal.core.measures.confusion import compute_class_matrix, measure_class_divergence
from shoal.core.measures.evaluate import Evaluator, compute_device_accuracy
from shoal.core.model import tree
from shoal.core.phases import in_phase
from shoal.core.types import SERVER, Reply, Round

TAU = 1 - 1e-5
"""The diagonal of the ideal matrix that `class_kl` compares with."""


@dataclass(frozen=True, eq=False)
class LocalModelEvaluator:
    """Averages metrics over the local models of a round. Only a simulation can: it knows all labels and samples."""

    evaluator: Evaluator
    samples: Callable[[int], Samples]
    metrics: tuple[str, ...]
    """Those of `--metrics`; `local` and `class_kl` are computed here."""

    @in_phase("evaluate")
    def __call__(self, round: Round) -> dict[str, Any]:
        replies = [reply for reply in round.replies if reply.device != SERVER]
        if not replies or not self.metrics:
            return {}
        metrics = {}
        if "local" in self.metrics:
            metrics["local_risk"] = float(np.mean([self.measure_risk(reply, round) for reply in replies]))
        if "class_kl" in self.metrics:
            metrics["class_kl"] = float(np.mean([self.measure_unevenness(reply, round) for reply in replies]))
        return metrics

    def measure_risk(self, reply: Reply, round: Round) -> float:
        """1 - accuracy of a local model re-weighted to the labels of each device, averaged over all devices."""
        counts = self.evaluator.run_test_pass(round.net, rebuild_local_model(reply, round))
        assert self.evaluator.labels is not None
        return float(1 - np.nanmean(compute_device_accuracy(self.evaluator.labels, counts["right"], counts["total"])))

    def measure_unevenness(self, reply: Reply, round: Round) -> float:
        """`measure_class_divergence` of a local model on the samples that it was trained on."""
        matrix, counts = compute_class_matrix(round.net, rebuild_local_model(reply, round), self.samples(reply.device))
        return float(measure_class_divergence(matrix, counts, TAU))


def rebuild_local_model(reply: Reply, round: Round) -> tree.Params:
    """The local model: anchor + delta; tensors that the device did not send are those of the anchor."""
    return round.anchor | tree.add_params({k: round.anchor[k] for k in reply.delta}, reply.delta)
