"""Devices report the mean loss of the mini-batches that they trained on."""

from dataclasses import dataclass

import torch

from shoal.core.batch import BatchScore
from shoal.core.extras import Declaration, Extra
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local


@dataclass(frozen=True)
class ReportsMeanLoss(Part):
    """A part whose devices report `loss`, the mean over the mini-batches of the round."""

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"loss": torch.zeros((), dtype=device.net.dtype, device=device.net.place)}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        return update, {"loss": state["loss"] + scored.loss}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"loss": (state["loss"] / device.numbers["steps"]).float()}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"loss": Extra(about="the mean loss of its batches")}
