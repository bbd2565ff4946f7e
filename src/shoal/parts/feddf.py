"""FedDF: the mean of the replies' logits is distilled into the combined model (Lin et al. 2020, arXiv:2006.07242)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.measures.local_models import rebuild_local_model
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require, require_server

CHUNK = 512
GAIN_FACTOR, LOWEST_KL = 0.99, 1e-6
"""A gain is a KL below this part of the lowest so far; below the second number nothing is left to gain."""


@dataclass(frozen=True)
class FedDF(Part):
    """The server distils the mean logits of the replies' models into the combined model, on inputs without labels.

    Adam at the rate `lr` lowers KL(softmax(mean logits) || student) on the server's inputs, in batches of `batch` (0:
    as large as those of devices), for at most `steps` steps. After every pass the KL over all inputs is measured: it
    chooses the model that is kept, and training stops when `patience` steps did not lower it. All models run with their
    running statistics, as in evaluation.
    """

    needs_server_model: ClassVar = True
    cite: ClassVar = ("lin2020feddf",)
    needs_class_logits: ClassVar = True
    reads: ClassVar = frozenset({"updates"})
    neutral: ClassVar = Neutral({"steps": 0})

    lr: float = 1e-3
    steps: int = 10_000
    patience: int = 1_000
    batch: int = 0
    """0: as large as those of devices."""

    def __post_init__(self):
        require(self, "lr > 0", self.lr > 0)
        bounds = 0 <= self.steps <= 10**9 and 1 <= self.patience <= 10**9 and 0 <= self.batch <= 10**9
        require(self, "steps and batch from 0 and patience from 1 to 1e9", bounds)

    def init_server(self, round: Round) -> Tree:
        require_server(self, round, "distils on")
        return {}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        if not self.steps:
            return params, state
        assert round.server is not None
        teachers = [compute_logits(round.net, model, round.server) for model in list_teacher_models(round)]
        return params | self.distil_ensemble(params, torch.stack(teachers).mean(0), round.server, round), state

    def distil_ensemble(self, params: Params, target: Tensor, samples: Samples, round: Round) -> Params:
        """The shared parameters nearest to the target, of those at the start and at the end of each pass."""
        net, generator = round.net, round.generator()
        kept = tree.select_params(params, net.shared_trainable)
        leaves = {k: v.detach().clone().requires_grad_() for k, v in kept.items()}
        adam = torch.optim.Adam(list(leaves.values()), self.lr)
        size = min(self.batch or round.work.batch, len(samples))
        lowest, taken, gained = float(compute_distillation_loss(compute_logits(net, params, samples), target)), 0, 0
        while taken < self.steps and taken - gained < self.patience and lowest > LOWEST_KL:
            order = torch.from_numpy(generator.permutation(len(samples)))
            for rows in order.split(size)[: self.steps - taken]:
                inputs = samples.take_batch(samples.index[rows]).inputs
                adam.zero_grad()
                compute_distillation_loss(
                    net.forward(params | leaves, inputs)[0], target[rows.to(target.device)]
                ).backward()
                adam.step()
                taken += 1
            now = float(compute_distillation_loss(compute_logits(net, params | leaves, samples), target))
            if now < GAIN_FACTOR * lowest:
                lowest, gained, kept = now, taken, {k: v.detach().clone() for k, v in leaves.items()}
        return kept


def list_teacher_models(round: Round) -> Iterator[Params]:
    """The models of the replies that count; of a slice, the rest is as it was sent."""
    counted = [reply for reply, weight in zip(round.replies, round.weights.tolist(), strict=True) if weight > 0]
    return (rebuild_local_model(reply, round) for reply in counted)


@torch.no_grad()
def compute_logits(net: Net, params: Params, samples: Samples) -> Tensor:
    """What a model says about every sample."""
    return torch.cat([net.forward(params, samples.take_batch(rows).inputs)[0] for rows in samples.index.split(CHUNK)])


def compute_distillation_loss(student: Tensor, target: Tensor) -> Tensor:
    """The mean of KL(target || student) over samples, and positions."""
    ours, theirs = (F.log_softmax(logits.flatten(0, -2), -1) for logits in (student, target))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
