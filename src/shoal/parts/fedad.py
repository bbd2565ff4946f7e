"""FedAD: slow devices leave out units that matter little, others in every round (Liu et al. 2025, arXiv:2507.10430)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Batch, BatchScore, Device, Local, Round, Scorer
from shoal.core.wire import REQUEST
from shoal.parts.lib.checks import require, require_axes, require_curvature
from shoal.parts.lib.curvature import RULES, FlatLoss, estimate_pruning_rate
from shoal.parts.lib.dropout_rates import (
    compute_device_rates,
    compute_neuron_rates,
    draw_kept_neurons,
    estimate_device_seconds,
)
from shoal.parts.lib.unit_scores import average_neuron_scores, score_neurons

MANY = 10**9


@dataclass(frozen=True)
class FedAD(Part):
    """Every `check` rounds devices report how much each unit matters. When that settles they report, in the next round,
    which share of the model the curvature of their loss says can go; from then on devices train sub-models.

    It settles when the change of the reports has not fallen for `patience` rounds, at the latest in round `force`, and
    later whenever the change is smaller than at the last time. `rule` names how the share is found (`fixed`: `rate`).
    No unit drops out with a higher chance than `most`, and of every axis the share `least` is always kept.
    """

    cite: ClassVar = ("liu2025feddhad",)
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"rule": "fixed", "rate": 0.0, "check": 1, "force": 0})

    rule: str = "slq_plateau"
    rate: float = 0.378
    direction: str = "corrected"
    check: int = 5
    patience: int = 10
    force: int = 50
    most: float = 0.9
    least: float = 0.1
    images: int = 100
    steps: int = 50

    def __post_init__(self):
        require(self, f"rule one of {', '.join(RULES)}", self.rule in RULES)
        require(self, "direction corrected or literal", self.direction in ("corrected", "literal"))
        shares = 0 <= self.rate < 1 and 0 < self.most < 1 and 0 <= self.least <= 1
        require(self, "0 <= rate < 1, 0 < most < 1, 0 <= least <= 1", shares)
        require(
            self, "check, images and steps from 1 up", all(0 < n < MANY for n in (self.check, self.images, self.steps))
        )
        require(self, "patience and force from 0 up", all(0 <= n < MANY for n in (self.patience, self.force)))

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, round.net.axes)
        if self.rule != "fixed":
            require_curvature(self, round.net)
        return {"scores": {}, "rate": -1.0, "asking": False, "change": -1.0, "best": -1.0, "since": 0}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        matter = {axis: own.cpu().numpy() for axis, own in state["scores"].items()}
        made = dict(plans)
        for device, rates in self.compute_dropout_rates(state, round).items():
            generator = round.generator(f"device {device}")
            kept = {
                a: torch.from_numpy(draw_kept_neurons(d, matter[a], self.least, generator)) for a, d in rates.items()
            }
            made[device] = replace(plans[device], kept=kept)
        return made, state

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        asked = {"scores": REQUEST} if round.number % self.check == 0 else {}
        asked |= {"rate": REQUEST} if state["asking"] else {}
        told: dict[int, dict] = {device: dict(asked) for device in round.devices}
        like = round.anchor[round.net.trainable[0]]
        for device, rates in self.compute_dropout_rates(state, round).items():
            told[device]["scale"] = {axis: torch.from_numpy(1 / (1 - d)).to(like) for axis, d in rates.items()}
        return told, state

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        if "scale" not in local.got:
            return inner

        def score_scaled(params: Params, batch: Batch) -> BatchScore:
            return inner(local.net.slicer.scale_unit_outputs(params, local.got["scale"]), batch)

        return score_scaled

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        found: dict = {}
        if not (device.has_request("scores") or device.has_request("rate")):
            return found
        batch = device.samples.take_batch(device.samples.index[: self.images])
        if device.has_request("scores"):
            found["scores"] = score_neurons(device.net, device.anchor, batch.inputs)
        if device.has_request("rate"):
            like = device.anchor
            cover = {k: device.covered.get(k, torch.ones_like(like[k])) for k in device.net.shared_trainable}
            loss = FlatLoss(device.net, params, batch)
            loss.held = loss.flatten(cover).to(loss.flatten(params)) if device.covered else None
            share = estimate_pruning_rate(self.rule, loss, like, params, self.steps, device.generator("probe"))
            found |= {} if share is None else {"rate": torch.tensor(share, device=device.net.place)}
        return found

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        told = [(r, r.report.get(self.name(), {})) for r in round.replies if r.device != SERVER]
        rates = [(r.size, float(own["rate"])) for r, own in told if "rate" in own]
        if rates:
            mean = sum(n * d for n, d in rates) / sum(n for n, _ in rates)
            state = state | {"rate": mean, "asking": False}
        reports = [(r.size, own["scores"], round.plans[r.device]) for r, own in told if "scores" in own]
        if reports:
            state = self.track_score_change(state, average_neuron_scores(reports, state["scores"]), round.number)
        return params, state

    def track_score_change(self, state: Tree, new: dict[str, Tensor], number: int) -> Tree:
        """Whether the scores have settled, so that rates are due."""
        old, due = state["scores"], number >= self.force and state["rate"] < 0
        state = state | {"scores": new}
        if old:
            change = float(torch.cat([new[axis] - old[axis] for axis in new]).norm())
            if state["rate"] >= 0:
                due = change < state["change"]
            elif state["best"] < 0 or change < state["best"] * (1 - 1e-3):
                state = state | {"best": change, "since": number}
            else:
                due |= number - state["since"] >= self.patience
            state = state | ({"change": change} if due else {})
        if not due:
            return state
        return state | ({"rate": self.rate} if self.rule == "fixed" else {"asking": True})

    def compute_dropout_rates(self, state: Tree, round: Round) -> dict[int, dict[str, np.ndarray]]:
        """By device and axis, the chance of each unit to drop out; nothing before the first update."""
        devices = [d for d in round.devices if d != SERVER]
        if state["rate"] < 0 or not state["scores"]:
            return {}
        shares = compute_device_rates(
            estimate_device_seconds(round, devices), state["rate"], self.direction == "literal"
        )
        matter = {axis: own.cpu().numpy() for axis, own in state["scores"].items()}
        taps = {axis.name: bool(axis.tap) for axis in round.net.axes}
        made: dict[int, dict[str, np.ndarray]] = {}
        for device, share in zip(devices, shares.tolist()):
            groups = [{a: own for a, own in matter.items() if taps[a] == mapped} for mapped in (True, False)]
            found = [compute_neuron_rates(group, share, self.most) for group in groups]
            made[device] = found[0] | found[1]
        return made
