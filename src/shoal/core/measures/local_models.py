"""How good the models are that devices come back with, before they are combined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.measures.confusion import class_matrix, distance
from shoal.core.measures.evaluate import Judge, by_device
from shoal.core.model import tree
from shoal.core.types import SERVER, Reply, Round, Samples

METRICS = {
    "local": "the error of local models, averaged over the label mixes of all devices",
    "class_kl": "how far local models are from doing equally well on each of their classes",
}
TAU = 1 - 1e-5


@dataclass(frozen=True, eq=False)
class LocalModels:
    """Judges the models of a round's replies; a simulation can, since it knows every device's labels and samples."""

    judge: Judge
    samples: Callable[[int], Samples]
    metrics: tuple[str, ...]

    def __call__(self, round: Round) -> dict[str, Any]:
        replies = [reply for reply in round.replies if reply.device != SERVER]
        if not replies or not self.metrics:
            return {}
        found = {}
        if "local" in self.metrics:
            found["local_risk"] = float(np.mean([self.risk(reply, round) for reply in replies]))
        if "class_kl" in self.metrics:
            found["class_kl"] = float(np.mean([self.unevenness(reply, round) for reply in replies]))
        return found

    def risk(self, reply: Reply, round: Round) -> float:
        """A local model's error on each class, weighted as each device of the population holds them, and averaged."""
        found = self.judge.counted(round.net, local_model(reply, round))
        assert self.judge.labels is not None
        return float(1 - np.nanmean(by_device(self.judge.labels, found["right"], found["total"])))

    def unevenness(self, reply: Reply, round: Round) -> float:
        """KL(P || Q) of a local model on the samples it learned from."""
        matrix, counts = class_matrix(round.net, local_model(reply, round), self.samples(reply.device))
        return float(distance(matrix, counts, TAU))


def local_model(reply: Reply, round: Round) -> tree.Params:
    """What a device came back with; what it did not send is as it was."""
    return round.anchor | tree.plus({k: round.anchor[k] for k in reply.delta}, reply.delta)


def wanted(metrics: Sequence[str]) -> tuple[str, ...]:
    return tuple(m for m in metrics if m in METRICS)
