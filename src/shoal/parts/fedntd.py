"""FedNTD: what the received model says of the classes that are not true is kept (Lee et al. 2022, arXiv:2106.03097)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model import tree
from shoal.core.model.tree import Params
from shoal.core.part import Neutral, Part
from shoal.core.types import Local
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedNTD(Part):
    """Keeps what the received model says of the classes that are not true, by distillation.

    It adds beta tau^2 KL(received || local) to the loss, both the softmax at temperature tau over all classes but the
    true one. The received model goes through the same scorer, so what parts listed behind this one do to a model holds
    for both.
    """

    cite: ClassVar = ("lee2022fedntd",)
    needs_class_logits: ClassVar = True
    neutral: ClassVar = Neutral({"beta": 0.0})

    beta: float = 1.0
    tau: float = 1.0

    def __post_init__(self):
        require(self, "beta >= 0 and tau > 0", self.beta >= 0 and self.tau > 0)

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_not_true(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            received = inner(tree.select_params(local.anchor, params), batch).logits.detach()
            apart = torch.zeros_like(scored.loss)
            for targets, weight in batch.targets:
                own = compute_not_true_kl(received / self.tau, scored.logits / self.tau, targets)
                apart = apart + batch.mean(own if weight is None else own * weight)
            return scored._replace(loss=scored.loss + self.beta * self.tau**2 * apart)

        return score_not_true


def compute_not_true_kl(teacher: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """KL between the probabilities of the classes that are not true, for each sample; the mean over its positions."""
    true = targets.unsqueeze(-1) == torch.arange(logits.shape[-1], device=logits.device)
    lowest = torch.finfo(logits.dtype).min
    p, q = (t.masked_fill(true, lowest).log_softmax(-1) for t in (teacher, logits))
    apart = (p.exp() * (p - q).masked_fill(true, 0.0)).sum(-1)
    return apart.reshape(len(apart), -1).mean(1)
