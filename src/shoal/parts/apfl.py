"""APFL: a device uses a mixture of its own model and the shared one (Deng et al. 2020, arXiv:2003.13461)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model import tree
from shoal.core.model.heads import add_side_tensors
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.model.twins import add_twins, detach_twins, list_twins
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.side_loss import add_side_loss

TWIN, SHARE = "apfl", "apfl_mixture.share"


@dataclass(frozen=True)
class APFL(Part):
    """The own model v learns inside the mixture share v + (1 - share) w; the shared model w as in FedAvg.

    `share` is that of the own model. With `adaptive` every device learns its own, by one step in the first batch of
    every round that it takes part in.
    """

    cite: ClassVar = ("deng2020apfl",)
    neutral: ClassVar = Neutral({})

    share: float = 0.5
    adaptive: bool = False

    def __post_init__(self):
        require(self, "share from 0 to 1", 0 <= self.share <= 1)

    def model(self, net: Net) -> Net:
        owner, _, key = SHARE.partition(".")
        return add_side_tensors(
            add_twins(net, TWIN, self.name()),
            owner,
            {key: torch.full((1,), self.share, dtype=torch.float64)},
            "personal",
        )

    def mask(self, local: Local) -> Params:
        share = find_share(local.anchor)
        return {share: (local.numbers["step"] < 0.5).to(local.net.dtype) * float(self.adaptive)}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_both(params: Params, batch: Batch) -> BatchScore:
            scored = inner(detach_twins(params, TWIN), batch)
            mixed = inner(tree.detach_params(params) | mix_models(params, params[find_share(params)]), batch)
            return add_side_loss(scored, mixed.loss)

        return score_both

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        share = find_share(params)
        return params | {share: params[share].clamp(0, 1)}, memory

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        return params | mix_models(params, params[find_share(params)])


def find_share(params: Params) -> str:
    """The name of the tensor with the share; a part that wraps the model puts something before it."""
    return next(name for name in params if f".{name}".endswith(f".{SHARE}"))


def mix_models(params: Params, share: Tensor) -> Params:
    """share v + (1 - share) w, by the names of w, through which no gradient goes to w."""
    share = share.clamp(0, 1).reshape(())
    return {k: share * v + (1 - share) * params[k].detach() for k, v in list_twins(params, TWIN).items()}
