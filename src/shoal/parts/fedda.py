"""FedDA: devices carry the server's momentum on and hand it back (Jin et al. 2022, ICML)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.core.batch import BatchScore
from shoal.core.extras import Declaration, Extra
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.reply_means import average_trees

WALKS = ("gradient", "momentum")


@dataclass(frozen=True)
class FedDA(Part):
    """Devices go on with the server's momentum m and send it back, and its mean is the server's next m.

    On a device m_k = beta m_k + (1 - beta) g, from the server's m; the first gradient of all is m_k itself.

    `walk` is along what a device moves: `gradient` takes plain steps, where no momentum makes it drift, and returns
    what steps along m_k would have made; `momentum` takes those steps.
    """

    cite: ClassVar = ("jin2022fedda",)
    corrects_steps: ClassVar = True
    reads: ClassVar = frozenset({"extras"})
    neutral: ClassVar = Neutral({"beta": 0.0})
    assumes_sgd: ClassVar = True
    assumes_constant_lr: ClassVar = True

    beta: float = 0.9
    walk: str = "gradient"

    def __post_init__(self):
        require(self, "0 <= beta < 1", 0 <= self.beta < 1)
        require(self, f"walk in {WALKS}", self.walk in WALKS)

    def init_server(self, round: Round) -> Tree:
        return {"m": tree.make_zeros(tree.select_params(round.anchor, round.net.shared_trainable)), "moved": False}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        return {d: {"m": state["m"]} for d in round.devices if state["moved"]}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        m = device.got.get("m") or tree.make_zeros(tree.select_params(device.anchor, device.net.shared_trainable))
        known = torch.tensor(float("m" in device.got), dtype=device.net.dtype, device=device.net.place)
        return params, {"m": m, "known": known, "ahead": tree.make_zeros(m) if self.walk == "gradient" else {}}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        kept = self.beta * state["known"]
        m = {k: kept * m + (1 - kept) * update[k] for k, m in state["m"].items()}
        ahead = {k: v + (m[k] - update[k]) for k, v in state["ahead"].items()}
        state = {"m": m, "known": torch.ones_like(kept), "ahead": ahead}
        return (update | m if self.walk == "momentum" else update), state

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """From where the gradients led to where the momenta would have; what could not move stays."""
        moved = {k: params[k] - device.numbers["lr"] * v for k, v in state["ahead"].items()}
        return params | {k: torch.where(params[k] == device.anchor[k], params[k], v) for k, v in moved.items()}, memory

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"m": state["m"]}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"m": Extra("params", crowd="mean", about="the momentum after training")}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        changes = [tree.subtract_params(reply.report[self.name()]["m"], state["m"]) for reply in round.replies]
        return params, {"m": tree.add_params(state["m"], average_trees(changes, round)), "moved": True}
