"""q-FFL: devices with a higher loss pull harder, which evens accuracy out (Li et al. 2020, arXiv:1905.10497)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.extras import Declaration, Extra
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Reply, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.sample_losses import compute_loss_on_samples
from shoal.parts.lib.tensor_norms import compute_norm


@dataclass(frozen=True)
class QFFL(Part):
    """A reply counts F_k^q, F_k being the loss of the received model on its device (q-FedAvg).

    w = anchor - sum F_k^q D_k / sum h_k, where D_k = (anchor - w_k) / lr and
    h_k = q F_k^(q - 1) |D_k|^2 + F_k^q / lr. All devices count alike, whatever their size. `q` is how much fairness
    counts: with 0 the result is the plain mean of the replies; a larger one also makes shorter steps.
    """

    cite: ClassVar = ("li2020qffl",)
    reads: ClassVar = frozenset({"extras", "updates"})
    sets: ClassVar = frozenset({"weigh"})
    needs_whole: ClassVar = True
    assumes_sgd: ClassVar = True
    neutral: ClassVar = Neutral({"q": 0.0}, equal_devices=True)
    metrics: ClassVar = (
        Metric("loss", "mean loss of the received model on devices", better="down", drawn=True),
        Metric("largest_loss", "largest loss of the received model on a device", better="down", drawn=True),
    )

    q: float = 1.0

    def __post_init__(self):
        require(self, "0 <= q <= 20", 0 <= self.q <= 20)

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"loss": compute_loss_on_samples(device.net, device.anchor, device.samples).float()}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"loss": Extra(low=0, about="the loss of the received model on its samples")}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return (weights > 0).to(weights.dtype), state

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        names, lipschitz = round.net.shared_trainable, 1 / max(round.work.lr, 1e-12)
        losses = torch.stack([r.report[self.name()]["loss"].double().cpu() for r in replies])
        norms = torch.stack([compute_norm(tree.select_params(r.delta, names)) for r in replies]).cpu()
        round.tell("largest_loss", losses.max())
        # as in the authors' code, 1e-10 lets a device without any loss keep a derivative
        losses = losses + 1e-10
        pulls = round.weights.cpu() * losses**self.q
        h = self.q * pulls / losses * (lipschitz * norms).square() + lipschitz * pulls
        steps = (lipschitz * pulls / h.sum()).nan_to_num(0.0).tolist()
        moved = {k: round.anchor[k].clone() for k in names}
        for reply, step in zip(replies, steps, strict=True):
            for name, value in moved.items():
                value.add_(reply.delta[name], alpha=step)
        return average_replies(round) | moved, state
