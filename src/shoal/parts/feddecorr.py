"""FedDecorr: features must not say the same thing twice (Shi et al. 2023, arXiv:2210.00226)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedDecorr(Part):
    """Adds beta times the mean squared correlation between different features to the local loss.

    With z the N standardised features of a batch and K = z'z, it is the mean squared entry of K off its diagonal, over
    N. Features are what the last layer reads; every position of a text is a row of its own.
    """

    cite: ClassVar = ("shi2023feddecorr",)
    neutral: ClassVar = Neutral({"beta": 0.0})
    mixes_batch: ClassVar = True

    beta: float = 0.1

    def __post_init__(self):
        require(self, "beta >= 0", self.beta >= 0)

    def init_server(self, round: Round) -> Tree:
        if name_feature_reader(round.net) not in round.anchor:
            problem = "feddecorr looks at what the last linear layer reads, and the model has none."
            raise ShoalError("bad-part", problem, "Use a model that ends with nn.Linear, or leave the part out.")
        return {}

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """How many pairs of features there are: of units that a device does not hold, a masked model has zeros."""
        name = name_feature_reader(device.net)
        lines = device.net.slicer.find_kept_lines(name, params[name], device.plan)
        held = int(lines[1].sum()) if 1 in lines else params[name].shape[1]
        return params, {"pairs": params[name].new_tensor(max(held * (held - 1), 1))}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_decorrelated(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            rows = scored.features.flatten(0, -2)
            weight = torch.ones_like(rows[:, 0])
            if batch.weight is not None:
                weight = batch.weight.to(rows.dtype).repeat_interleave(len(rows) // len(batch.weight))
            return scored._replace(
                loss=scored.loss + self.beta * sum_squared_correlations(rows, weight) / local.state["pairs"]
            )

        return score_decorrelated


def sum_squared_correlations(rows: Tensor, weight: Tensor) -> Tensor:
    """The sum of the squared entries of K off its diagonal, over N; rows of weight 0 are not there.

    The squares of z'z and of zz' have the same sum, so the smaller of the two is made.
    """
    count, there = weight.sum().clamp(min=1), weight.unsqueeze(1)
    centred = (rows - (rows * there).sum(0) / count) * there
    # fewer than two rows have no variance; 1e-8 below is for features that are constant
    variance = centred.square().sum(0) / (count - 1).clamp(min=1)
    z = centred / (variance + 1e-8).sqrt()
    product = z @ z.T if len(z) < z.shape[1] else z.T @ z
    return (product.square().sum() - z.square().sum(0).square().sum()) / count


def name_feature_reader(net: Net) -> str:
    """The tensor that reads the features."""
    return f"{net.head_name}.weight"
