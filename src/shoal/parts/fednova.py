"""FedNova: devices that took more steps do not pull harder (Wang et al. 2020, arXiv:2007.07481)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from shoal.core.aggregate import average_replies
from shoal.core.extras import Declaration, Extra
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.optimiser import Optimiser
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Reply, Round


@dataclass(frozen=True)
class FedNova(Part):
    """Averages updates per effective step, so that devices that took more steps do not pull harder.

    w = anchor + (sum p_k a_k) sum p_k delta_k / a_k, a_k being the effective steps of device k.
    """

    cite: ClassVar = ("wang2020fednova",)
    reads: ClassVar = frozenset({"extras", "updates"})
    neutral: ClassVar = Neutral({}, equal_devices=True)
    assumes_sgd: ClassVar = True

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"steps": device.numbers["steps"].to(torch.int32)}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"steps": Extra(kind="int", low=1, about="how many local steps it made")}

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        effective = [compute_effective_steps(int(r.report[self.name()]["steps"]), round.optimiser) for r in replies]
        mean = sum(p * a for p, a in zip(round.weights.tolist(), effective, strict=True))
        scaled = [
            replace(
                r, delta=r.delta | tree.scale_params(tree.select_params(r.delta, round.net.shared_trainable), mean / a)
            )
            for r, a in zip(replies, effective)
        ]
        return average_replies(replace(round, replies=scaled)), state


def compute_effective_steps(steps: int, optimiser: Optimiser) -> float:
    """The weight that local SGD gives to a constant gradient over its steps, in steps of the round's lr."""
    rho, schedule = optimiser.momentum, optimiser.schedule
    if not schedule and not optimiser.nesterov:
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    velocity = weight = 0.0
    for factor in schedule.list_factors(steps):
        velocity = rho * velocity + 1
        weight += factor * (1 + rho * velocity if optimiser.nesterov else velocity)
    return weight
