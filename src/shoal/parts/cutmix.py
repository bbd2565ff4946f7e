"""CutMix: a box of every image is another one's, whose label counts by area (Yun et al. 2019, arXiv:1905.04899)."""

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
class CutMix(Part):
    """A box of every image comes from another one of the batch, whose label counts by the area of the box.

    The share of the image that stays is drawn from Beta(alpha, alpha), the middle of the box uniformly, one of each for
    the whole batch; the box is cut off at the border, and the share is what then stays.
    """

    cite: ClassVar = ("yun2019cutmix",)
    neutral: ClassVar = Neutral({"alpha": 0.0})
    mixes_batch: ClassVar = True

    alpha: float = 1.0

    def __post_init__(self):
        require(self, "0 <= alpha <= 1e6", 0 <= self.alpha <= 1e6)

    def model(self, net: Net) -> Net:
        require_one_tensor(self, net, "cuts boxes out of")
        if self.alpha > 0 and (net.token_inputs or len(net.input_shape) not in (1, 3)):
            problem = f"cutmix cuts boxes out of images, and a sample of this data has the shape {net.input_shape}."
            raise ShoalError("bad-part", problem, "Leave cutmix out.")
        return net

    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        middle, seed = torch.rand(3, generator=generator), torch.randint(2**62, (), generator=generator)
        share = np.random.default_rng(int(seed)).beta(self.alpha, self.alpha) if self.alpha > 0 else 1.0
        share = torch.tensor(share, dtype=device.net.dtype)
        return {"share": share, "row": middle[0], "column": middle[1], "shift": middle[2]}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_patched(params: Params, batch: Batch) -> BatchScore:
            return inner(params, patch_batch(batch, **local.draws))

        return score_patched


def patch_batch(batch: Batch, share: Tensor, row: Tensor, column: Tensor, shift: Tensor) -> Batch:
    """Each image with a box of its partner's; a sample that is no image counts as one of a single row."""
    x = batch.inputs
    assert isinstance(x, Tensor)
    images = x if x.dim() == 4 else x[:, None, None]
    height, width = images.shape[-2:]
    side = (1 - share.to(x.dtype)).sqrt()
    if height == 1:  # the box is as high as the image
        inside = cover_interval(column.to(x.dtype), side.square(), width)[None]
    else:
        in_rows = cover_interval(row.to(x.dtype), side, height)
        inside = in_rows[:, None] & cover_interval(column.to(x.dtype), side, width)
    partner = find_partners(batch, shift)
    patched = torch.where(inside, images.index_select(0, partner), images).view(x.shape)
    own = 1 - inside.to(x.dtype).mean()
    return batch._replace(inputs=patched, targets=add_partner_targets(batch, partner, own))


def cover_interval(middle: Tensor, share: Tensor, length: int) -> Tensor:
    """Which of `length` places lie in an interval of a share of them around a middle from 0 to 1."""
    places = torch.arange(length, device=middle.device, dtype=middle.dtype)
    size, first = (share * length).floor(), (middle * length).floor()
    return (places >= first - (size / 2).floor()) & (places < first - (size / 2).floor() + size)
