"""SCAFFOLD: control variates take the drift out of local steps (Karimireddy et al. 2020, arXiv:1910.06378)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.batch import BatchScore
from shoal.core.extras import Declaration, Extra
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Local, Round
from shoal.parts.lib.tensor_norms import compute_norm


@dataclass(frozen=True)
class Scaffold(Part):
    """Control variates take the drift out of local steps: a step goes along g - c_k + c.

    c_k is the mean gradient that a device last saw, c their mean with the weights of replies.
    """

    cite: ClassVar = ("karimireddy2020scaffold",)
    corrects_steps: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "drift",
            "drift of devices: norm of what a round changes in c_k, mean",
            drawn=True,
            about="mean over replies of the 2-norm of the change of c_k: how far the mean gradients of a device moved "
            "since it last took part",
        ),
        Metric("c_norm", "norm of the control variate c", drawn=True, about="2-norm of c after the round"),
    )
    reads: ClassVar = frozenset({"extras", "sizes"})
    neutral: ClassVar = Neutral({}, rounds=1)
    assumes_sgd: ClassVar = True

    def init_server(self, round: Round) -> Tree:
        beta = round.optimiser.momentum
        if beta > 0.5:  # c_k - c is multiplied by about -beta / (1 - beta) in every round of many steps
            growth = f"the correction c_k - c grows about {beta / (1 - beta):.1f} times in every round of many steps"
            round.log(f"With local momentum {beta:g} {growth} and may diverge; SCAFFOLD is made for plain SGD.")
        return {"c": tree.make_zeros(tree.select_params(round.anchor, round.net.shared_trainable))}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        return {d: {"c": state["c"]} for d in round.devices}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"c_k": memory.get("c_k") or tree.make_zeros(device.got["c"])}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        return update | {k: update[k] - c_k + local.got["c"][k] for k, c_k in state["c_k"].items()}, state

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"c_k": compute_control_variate(params, state, device)}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"change": tree.subtract_params(compute_control_variate(params, state, device), state["c_k"])}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"change": Extra("params", crowd="sum", about="the change of its control variate")}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        c, shares, drifts = state["c"], round.population_shares, []
        for reply in round.replies:
            if reply.device != SERVER:
                change, share = reply.report[self.name()]["change"], float(shares[reply.device])
                c = {k: v + share * change[k] for k, v in c.items()}
                drifts.append(compute_norm(change))
        round.tell("drift", torch.stack(drifts).mean() if drifts else 0.0)
        round.tell("c_norm", compute_norm(c))
        return params, {"c": c}


def compute_control_variate(params: Params, state: Tree, device: Device) -> Params:
    """c_k - c + (anchor - w_k) / (lr * steps), or over the sum of lr where it changes from step to step."""
    c, span = device.got["c"], device.lr_sum
    return {k: c_k - c[k] + (device.anchor[k] - params[k]) / span for k, c_k in state["c_k"].items()}
