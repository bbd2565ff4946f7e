"""How good the models are that devices come back with, before they are combined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.measures.confusion import compute_class_matrix, measure_class_divergence
from shoal.core.measures.evaluate import Evaluator, compute_device_accuracy
from shoal.core.model import tree
from shoal.core.types import SERVER, Reply, Round, Samples

LOCAL_METRICS = {
    "local": "the error of local models, averaged over the label mixes of all devices",
    "class_kl": "how far local models are from doing equally well on each of their classes",
}
TAU = 1 - 1e-5


@dataclass(frozen=True, eq=False)
class LocalModelEvaluator:
    """Judges the models of a round's replies; a simulation can, since it knows every device's labels and samples."""

    judge: Evaluator
    samples: Callable[[int], Samples]
    metrics: tuple[str, ...]

    def __call__(self, round: Round) -> dict[str, Any]:
        replies = [reply for reply in round.replies if reply.device != SERVER]
        if not replies or not self.metrics:
            return {}
        found = {}
        if "local" in self.metrics:
            found["local_risk"] = float(np.mean([self.measure_risk(reply, round) for reply in replies]))
        if "class_kl" in self.metrics:
            found["class_kl"] = float(np.mean([self.measure_unevenness(reply, round) for reply in replies]))
        return found

    def measure_risk(self, reply: Reply, round: Round) -> float:
        """A local model's error on each class, weighted as each device of the population holds them, and averaged."""
        found = self.judge.run_test_pass(round.net, rebuild_local_model(reply, round))
        assert self.judge.labels is not None
        return float(1 - np.nanmean(compute_device_accuracy(self.judge.labels, found["right"], found["total"])))

    def measure_unevenness(self, reply: Reply, round: Round) -> float:
        """KL(P || Q) of a local model on the samples it learned from."""
        matrix, counts = compute_class_matrix(round.net, rebuild_local_model(reply, round), self.samples(reply.device))
        return float(measure_class_divergence(matrix, counts, TAU))


def rebuild_local_model(reply: Reply, round: Round) -> tree.Params:
    """What a device came back with; what it did not send is as it was."""
    return round.anchor | tree.add_params({k: round.anchor[k] for k in reply.delta}, reply.delta)


def select_local_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    return tuple(m for m in metrics if m in LOCAL_METRICS)
