"""FedDU: the server trains on its own samples as far as they can help (Liu et al. 2024, arXiv:2408.05678)."""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.local.step import compute_sample_losses
from shoal.core.measures.divergence import measure_label_degree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Round, Samples
from shoal.parts.lib.checks import require, require_server
from shoal.parts.lib.label_counts import collect_label_counts, count_labels

CHUNK = 512


@dataclass(frozen=True)
class FedDU(Part):
    """From the combined model the server trains as a device would, and goes the share alpha of that way.

    alpha is smaller the better the model is on the server's samples, the fewer those are and the less their labels are
    like everybody's, beside the labels of the devices that took part. `steps` makes it the constant steps / tau.
    """

    cite: ClassVar = ("liu2024feddumap",)
    neutral: ClassVar = Neutral({"scale": 0.0, "steps": 0})

    accuracy: str = "complement"
    scale: float = 1.0
    decay: float = 0.999
    steps: int = 0
    epsilon: float = 0.01

    def __post_init__(self):
        require(self, f"accuracy in {tuple(ACCURACY_FACTORS)}", self.accuracy in ACCURACY_FACTORS)
        require(self, "scale and decay >= 0, epsilon > 0", min(self.scale, self.decay) >= 0 and self.epsilon > 0)
        require(self, "0 <= steps <= 1e9", 0 <= self.steps <= 10**9)

    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        return card | {"labels": count_labels(samples, net.classes)}

    def init_server(self, round: Round) -> Tree:
        require_server(self, round, "trains on")
        return {"labels": collect_label_counts({}, round)}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        state = state | {"labels": collect_label_counts(state["labels"], round)}
        assert round.server is not None
        correct, loss = evaluate_on_server(round.net, params, round.server)
        alpha = self.compute_effective_share(correct, state["labels"], round)
        if alpha <= 1e-3:
            return params, state
        trained = round.learn(params, round.work)
        moved = {k: torch.lerp(params[k], trained[k], alpha) for k in round.net.shared_trainable}
        buffers = {k: trained[k] for k in params if k in round.net.buffers and k in round.net.names_with_role("shared")}
        new = params | moved | buffers
        after = evaluate_on_server(round.net, new, round.server)[1]
        return (params if not after < 3 * max(loss, 1e-12) else new), state

    def compute_effective_share(self, correct: float, labels: Tree, round: Round) -> float:
        """alpha: how far the server goes on the way of its own training."""
        assert round.server is not None
        n0 = len(round.server)
        if self.steps:
            return min(1.0, self.steps / count_server_steps(n0, round))
        own = count_labels(round.server, round.net.classes).numpy().astype(float)
        here = [f"device {r.device}" for r in round.replies if r.device != SERVER]
        pooled = sum((labels[d].numpy() for d in here), np.zeros(len(own)))
        everybody = sum((known.numpy() for known in labels.values()), np.zeros(len(own)))
        size = sum(r.size for r in round.replies if r.device != SERVER)
        share = compute_server_data_share(
            n0, size, measure_label_degree(own, everybody), measure_label_degree(pooled, everybody)
        )
        return ACCURACY_FACTORS[self.accuracy](correct, self.epsilon) * share * self.scale * self.decay**round.number


ACCURACY_FACTORS = {
    "complement": lambda correct, epsilon: 1 - correct,
    "inverse": lambda correct, epsilon: 1 / (correct + epsilon),
}
"""How much the accuracy on the server's samples leaves to do."""


def compute_server_data_share(server: int, devices: int, server_degree: float, devices_degree: float) -> float:
    """What the server's samples are worth beside those of the round's devices: by number, and by how odd they are."""
    own, theirs = server * devices_degree, devices * server_degree
    return own / (own + theirs) if own + theirs > 0 else server / (server + devices)


def count_server_steps(samples: int, round: Round) -> int:
    """How many steps the server's own training has."""
    work = round.work
    batch = min(work.batch, samples)
    return work.steps or max(1, int(work.epochs * ceil(samples / batch)))


@torch.no_grad()
def evaluate_on_server(net: Net, params: Params, samples: Samples) -> tuple[float, float]:
    """Accuracy and mean loss on the server's samples."""
    right, loss, count = [], [], 0
    for rows in samples.index.split(CHUNK):
        batch = samples.take_batch(rows)
        logits, targets = net.forward(params, batch.inputs)[0], batch.targets[0][0]
        right.append((logits.argmax(-1) == targets).double().sum())
        loss.append(compute_sample_losses(logits, targets).double().sum())
        count += targets.numel()
    return float(torch.stack(right).sum()) / count, float(torch.stack(loss).sum()) / len(samples)
