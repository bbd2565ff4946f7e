"""FedDU: after averaging, the server trains on its own samples as far as they can help.

Liu et al. 2024, arXiv:2408.05678: section 3.2 and Algorithm 1, whose order this file follows. Its symbols:

    w^(t-1/2)     the aggregated model, formula (5);   w^t   the new global model, formula (4)
    tau, tau_eff  the steps of the server's training, formula (6), and the effective ones, formula (7)
    P_k, P_0      the label distribution of device k, and of the server's n_0 samples
    Pbar^t, Pbar  that of the n' samples of the round's devices, and of all devices
    D(P)          the non-IID degree of P, its Jensen-Shannon divergence from Pbar, formula (2)
    f'(acc)       what the accuracy on the server's samples leaves to do
"""

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.extras import Declaration
from shoal.core.measures.divergence import measure_label_degree
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Round
from shoal.parts.lib.checks import require, require_server
from shoal.parts.lib.label_counts import LABEL_COUNTS, collect_label_counts, count_labels
from shoal.parts.lib.submodel_units import device_state_key

CHUNK = 512
"""Samples that are evaluated at once."""
SMALLEST_ALPHA = 1e-3
"""Below it the server does not train: so little of its way is not worth the time (as in the authors' code)."""
WORST_LOSS_RATIO = 3
"""A server step that multiplies the loss by so much has diverged, and is undone (as in the authors' code)."""


@dataclass(frozen=True)
class FedDU(Part):
    """The server trains on from the combined model, and goes the share alpha = tau_eff / tau of that way.

    alpha = f'(acc) * n_0 D(Pbar^t) / (n_0 D(Pbar^t) + n' D(P_0)) * C * decay^t: smaller the better the model is on the
    server's samples, the fewer those are, and the less their labels are like those of all devices.

    `accuracy` chooses f'(acc): `complement` is 1 - acc, `inverse` is 1 / (acc + `epsilon`). `scale` is C, and `decay`
    is taken to the power of the round. `steps` above 0 is a constant tau_eff (FedDU-S).
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("liu2024feddumap",)
    needs_class_logits: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "alpha",
            "share of its own way that the server goes",
            drawn=True,
            about="alpha = tau_eff / tau; 0 where the server does not train, or undoes its step",
        ),
        Metric(
            "server_accuracy",
            "accuracy on the server's samples",
            "share",
            "up",
            about="accuracy of the aggregate on the server's samples, before the server trains",
        ),
    )
    reads: ClassVar = frozenset({"cards", "sizes"})
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
        """A device tells how often it has each label, n_k P_k."""
        return card | {"labels": count_labels(samples, net.classes)}

    def declare_card(self, net: Net) -> Declaration:
        return {"labels": LABEL_COUNTS}

    def init_server(self, round: Round) -> Tree:
        require_server(self, round, "trains on")
        return {"labels": collect_label_counts({}, round)}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """w^t = w^(t-1/2) - tau_eff eta g_0 (Algorithm 1, line 5); `params` is w^(t-1/2), which line 4 makes.

        The normalised gradient g_0 of formula (6) is (w^(t-1/2) - trained) / (eta tau), `trained` being where tau steps
        lead, so that formula (4) is w^t = w^(t-1/2) + alpha (trained - w^(t-1/2)).
        """
        state = state | {"labels": collect_label_counts(state["labels"], round)}
        assert round.server is not None
        acc, loss = evaluate_on_server(round.net, params, round.server)
        round.tell("server_accuracy", acc)
        alpha = self.compute_effective_share(acc, state["labels"], round)
        if alpha <= SMALLEST_ALPHA:
            round.tell("alpha", 0.0)
            return params, state
        trained = round.learn(params, round.work)
        moved = {k: torch.lerp(params[k], trained[k], alpha) for k in round.net.shared_trainable}
        # running statistics are no steps of SGD: they are taken as training left them
        buffers = {k: trained[k] for k in params if k in round.net.buffers and k in round.net.names_with_role("shared")}
        new = params | moved | buffers
        new_loss = evaluate_on_server(round.net, new, round.server)[1]
        kept = new_loss < WORST_LOSS_RATIO * max(loss, 1e-12)  # False for a loss that is not a number, too
        round.tell("alpha", alpha if kept else 0.0)
        return (new if kept else params), state

    def compute_effective_share(self, acc: float, labels: Tree, round: Round) -> float:
        """alpha = tau_eff / tau, formula (7): how far the server goes on the way of its own training."""
        assert round.server is not None
        n0 = len(round.server)
        if self.steps:
            return min(1.0, self.steps / count_server_steps(n0, round))
        server_labels = count_labels(round.server, round.net.classes).numpy().astype(float)
        devices = [device_state_key(r.device) for r in round.replies if r.device != SERVER]
        round_labels = sum((labels[d].numpy() for d in devices), np.zeros(len(server_labels)))
        all_labels = sum((counts.numpy() for counts in labels.values()), np.zeros(len(server_labels)))
        n_devices = sum(r.size for r in round.replies if r.device != SERVER)
        share = compute_server_data_share(
            n0,
            n_devices,
            measure_label_degree(server_labels, all_labels),
            measure_label_degree(round_labels, all_labels),
        )
        return ACCURACY_FACTORS[self.accuracy](acc, self.epsilon) * share * self.scale * self.decay**round.number


ACCURACY_FACTORS = {
    "complement": lambda acc, epsilon: 1 - acc,
    "inverse": lambda acc, epsilon: 1 / (acc + epsilon),
}
"""f'(acc) of formula (7)."""


def compute_server_data_share(server: int, devices: int, server_degree: float, devices_degree: float) -> float:
    """n_0 D(Pbar^t) / (n_0 D(Pbar^t) + n' D(P_0)), the importance of the server's samples in formula (7).

    Where both degrees are 0 all labels are alike, and the numbers of samples decide.
    """
    server_mass, devices_mass = server * devices_degree, devices * server_degree
    mass = server_mass + devices_mass
    return server_mass / mass if mass > 0 else server / (server + devices)


def count_server_steps(samples: int, round: Round) -> int:
    """tau, the number of steps of the server's own training: its epochs E times the batches of n_0 samples."""
    work = round.work
    batch = min(work.batch, samples)
    return work.steps or max(1, int(work.epochs * ceil(samples / batch)))


@torch.no_grad()
def evaluate_on_server(net: Net, params: Params, samples: Samples) -> tuple[float, float]:
    """acc and the mean loss on the server's samples."""
    correct, loss, count = [], [], 0
    for rows in samples.index.split(CHUNK):
        batch = samples.take_batch(rows)
        logits, targets = net.forward(params, batch.inputs)[0], batch.targets[0][0]
        correct.append((logits.argmax(-1) == targets).double().sum())
        loss.append(net.task.compute_sample_losses(logits, targets).double().sum())
        count += targets.numel()
    return float(torch.stack(correct).sum()) / count, float(torch.stack(loss).sum()) / len(samples)
