"""Input Mixup: a model learns from blends of two samples, and of their labels (Zhang et al. 2018, arXiv:1710.09412)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.batch_partners import add_partner_targets, find_partners
from shoal.parts.lib.checks import require, require_one_tensor


@dataclass(frozen=True)
class Mixup(Part):
    """Every sample of a batch is blended with another one of it, and so are their labels.

    One share for the whole batch is drawn from Beta(alpha, alpha). The partner is the sample a drawn number of places
    further on, round the end of the batch, which is in random order anyway.
    """

    cite: ClassVar = ("zhang2018mixup",)
    neutral: ClassVar = Neutral({"alpha": 0.0})
    mixes_batch: ClassVar = True

    alpha: float = 1.0

    def __post_init__(self):
        require(self, "0 <= alpha <= 1e6", 0 <= self.alpha <= 1e6)

    def model(self, net: Net) -> Net:
        require_one_tensor(self, net, "blends")
        if net.token_inputs:
            raise ShoalError("bad-part", "mixup blends inputs, and words cannot be blended.", "Leave mixup out.")
        return net

    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        shift, seed = torch.rand((), generator=generator), torch.randint(2**62, (), generator=generator)
        share = np.random.default_rng(int(seed)).beta(self.alpha, self.alpha) if self.alpha > 0 else 1.0
        return {"share": torch.tensor(share, dtype=device.net.dtype), "shift": shift}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_blended(params: Params, batch: Batch) -> BatchScore:
            return inner(params, blend_batch(batch, local.draws["share"], local.draws["shift"]))

        return score_blended


def blend_batch(batch: Batch, share: Tensor, shift: Tensor) -> Batch:
    """Each sample with its partner's; both count for what they are in it. Padding is behind the samples and stays."""
    x = batch.inputs
    assert isinstance(x, Tensor)
    partner, own = find_partners(batch, shift), share.to(x.dtype)
    mixed = own * x + (1 - own) * x.index_select(0, partner)
    return batch._replace(inputs=mixed, targets=add_partner_targets(batch, partner, own))
