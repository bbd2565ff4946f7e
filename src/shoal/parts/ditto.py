"""Ditto: beside the shared model one of one's own, which is pulled towards it (Li et al. 2021, arXiv:2012.04221)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.model.twins import add_twins, detach_twins, list_twins, put_twins_in_place
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local
from shoal.parts.lib.checks import require
from shoal.parts.lib.side_loss import add_side_loss

TWIN = "ditto"


@dataclass(frozen=True)
class Ditto(Part):
    """The own model v learns from F(v) + lam/2 (v - w)^2, w the model received; the shared one as in FedAvg.

    `lam` is how strongly the own model is pulled to the one that was received; 0 is local training.
    """

    cite: ClassVar = ("li2021ditto",)
    neutral: ClassVar = Neutral({})

    lam: float = 1.0

    def __post_init__(self):
        require(self, "lam >= 0", self.lam >= 0)

    def model(self, net: Net) -> Net:
        return add_twins(net, TWIN, self.name())

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_both(params: Params, batch: Batch) -> BatchScore:
            scored = inner(detach_twins(params, TWIN), batch)
            own = inner(tree.detach_params(params) | list_twins(params, TWIN), batch)
            apart = sum((v - local.anchor[k]).square().sum() for k, v in list_twins(params, TWIN).items())
            return add_side_loss(scored, own.loss + self.lam / 2 * apart)

        return score_both

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        return put_twins_in_place(params, TWIN)
