"""Per-FedAvg: the shared model is learnt as one from which a single step leads far (Fallah et al. 2020)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model.tree import Params
from shoal.core.part import Neutral, Part
from shoal.core.types import Local, Work
from shoal.parts.lib.checks import require
from shoal.parts.lib.tensor_norms import compute_norm

REACH = 1e-3
"""How far from w the gradients lie whose difference stands for the Hessian."""


@dataclass(frozen=True)
class PerFedAvg(Part):
    """A step takes the gradient at u = w - alpha g(w), as far as one step of fine-tuning leads; that is what is used.

    u comes from every other sample of the batch and the gradient at u from the others, unless `halves` is off. `order`
    is 'fo', which leaves the Hessian out, or 'hf', which takes alpha H g(u) off by the difference of two gradients.
    """

    cite: ClassVar = ("fallah2020perfedavg",)
    perturbs_gradient: ClassVar = True
    assumes_sgd: ClassVar = True
    neutral: ClassVar = Neutral({"alpha": 0.0, "halves": False})

    alpha: float = 0.01
    order: str = "fo"
    halves: bool = True

    def __post_init__(self):
        require(self, "alpha >= 0 and order one of fo, hf", self.alpha >= 0 and self.order in ("fo", "hf"))

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        def compute_ahead(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            first, second = halve_batch(batch, local.net.dtype) if self.halves else (batch, batch)
            here, scored = inner(scorer, params, first)
            ahead, _ = inner(scorer, {k: p - self.alpha * here[k] for k, p in params.items()}, second)
            if self.order == "fo":
                return ahead, scored
            reach = (REACH / compute_norm(ahead).clamp(min=1e-12)).to(local.net.dtype)
            sides = ({k: p + sign * reach * ahead[k] for k, p in params.items()} for sign in (1, -1))
            up, down = (inner(scorer, side, batch)[0] for side in sides)
            return {k: g - self.alpha * (up[k] - down[k]) / (2 * reach) for k, g in ahead.items()}, scored

        return compute_ahead

    def finetune(self, work: Work) -> Work:
        return replace(work, epochs=0.0, steps=1, lr=self.alpha)


def halve_batch(batch: Batch, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """The batch with every second sample weighing nothing, and with the others; padding at its end changes neither."""
    targets = batch.targets[0][0]
    second = (torch.arange(len(targets), device=targets.device) % 2).to(dtype)
    weight = torch.ones_like(second) if batch.weight is None else batch.weight
    return batch._replace(weight=weight * (1 - second)), batch._replace(weight=weight * second)
