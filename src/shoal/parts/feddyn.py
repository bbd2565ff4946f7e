"""FedDyn: a dynamic regulariser whose local optima agree with the global one (Acar et al. 2021, arXiv:2111.04263)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.change_sums import extend_change_sum, extend_mean_change_sum, recall_change_sum
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedDyn(Part):
    """Adds a dynamic regulariser to the local loss, under which local optima agree with the global one.

    The term is alpha_k (|w|^2 / 2 - <w, anchor - h_k>), h_k being the sum of a device's past changes. alpha_k is alpha
    over the device's size relative to the mean size. The model that is broadcast is the plain mean of the replies plus
    the mean h of all devices; the plain mean itself is the model that is evaluated.
    """

    cite: ClassVar = ("acar2021feddyn",)
    reads: ClassVar = frozenset({"sizes", "updates"})
    sets: ClassVar = frozenset({"weigh"})
    neutral: ClassVar = Neutral({"alpha": 0.0}, rounds=1, equal_devices=True)

    alpha: float = 0.01

    def __post_init__(self):
        require(self, "alpha >= 0", self.alpha >= 0)

    def init_server(self, round: Round) -> Tree:
        own = tree.select_params(round.anchor, round.net.shared_trainable)
        return {"h": tree.make_zeros(own), "mean": own}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        return {d: {"mean_size": torch.tensor(compute_mean_size(round))} for d in round.devices}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        h = recall_change_sum(memory, params, device)
        return params, {"h": h, "share": device.numbers["size"] / device.got["mean_size"]}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        h, strength = local.state["h"], self.alpha / local.state["share"]

        def score_regularised(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            pull = sum((params[k].square() / 2 - params[k] * (local.anchor[k] - h[k])).sum() for k in h)
            return scored._replace(loss=scored.loss + strength * pull)

        return score_regularised

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"h": extend_change_sum(state["h"], params, device)}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return (weights > 0).to(weights.dtype), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        h = extend_mean_change_sum(state["h"], round)
        mean = tree.select_params(params, h)
        return params | tree.add_params(mean, h), {"h": h, "mean": mean}

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        return judged | {"": judged[""] | state["mean"]}


def compute_mean_size(round: Round) -> float:
    """Of all devices that hold data, whether they are there or not."""
    return float(round.sizes[round.sizes > 0].mean())
