"""FedAD as released: dropout rates by numbers of samples with a floor, drawn over all units, and a plain mean.

Released experiment code of FedDHAD (github.com/anonymous20231015/anonymous, commit da9f25db, experiments/FedAD.py) for
Liu et al. 2025, arXiv:2507.10430. The part `fedad` follows the paper. Symbols as there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch

from shoal.core.aggregate import average_replies
from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.extras import Declaration
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Local, Reply, Round
from shoal.core.wire import REQUEST
from shoal.parts.lib.checks import require, require_axes, require_curvature
from shoal.parts.lib.curvature import PRUNING_RATE, RULES, estimate_held_rate
from shoal.parts.lib.dropout_rates import (
    compute_rates_by_samples,
    compute_softmax_rates,
    draw_kept_neurons,
    scale_kept_units,
)
from shoal.parts.lib.submodel_units import list_rows_of_kinds
from shoal.parts.lib.unit_scores import UNIT_SCORES, average_neuron_scores, measure_map_ranks, sum_adjacent_weights

MANY = 10**9


@dataclass(frozen=True)
class FedADReleased(Part):
    """Device k drops max(1 - n_max (1 - d) / n_k, floor) of all filters and of all neurons, classes among them.

    In every round the ranks of the filters' maps, on `images` samples of the cohort's largest device, are compared with
    those of the round before. In the first round from `start` on in which they changed as much as in the round of the
    least change or more, the model goes back to that round's, and d is found by `rule` on the largest device (by its
    curvature after `steps` Lanczos steps; 'fixed' takes `rate`). Until round `until` it is lowered where the change is
    smaller than ever. A unit drops out with the chance d_k N softmax(-r), r its rank or the sum of its absolute weights
    times `score_scale`, over all filters or all neurons together; 1 and more is always. What a device did not train
    counts with its old value.
    """

    cite: ClassVar = ("liu2025feddhad",)
    metrics: ClassVar = (
        Metric(
            "dropout_rate",
            "dropout rate, mean over devices",
            "share",
            drawn=True,
            about="mean over the devices of a round of d_k; 0 before rates are set",
        ),
        Metric("dropped_share", "share of units dropped", "share", about="of all units, mean over the devices"),
    )
    reads: ClassVar = frozenset({"extras", "sizes", "updates"})
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"start": MANY - 1})

    rule: str = "slq_plateau"
    rate: float = 0.378
    floor: float = 0.05
    start: int = 40
    until: int = 250
    score_scale: float = 1.0
    images: int = 500
    steps: int = 50

    def __post_init__(self):
        require(self, f"rule one of {', '.join(RULES)}", self.rule in RULES)
        require(self, "0 <= rate < 1, 0 <= floor < 1", 0 <= self.rate < 1 and 0 <= self.floor < 1)
        require(self, "score_scale >= 0", self.score_scale >= 0)
        require(self, "images and steps from 1 up", all(0 < n < MANY for n in (self.images, self.steps)))
        require(self, "start and until from 0 up", all(0 <= n < MANY for n in (self.start, self.until)))

    @classmethod
    def name(cls) -> str:
        return "fedad_released"

    def init_server(self, round: Round) -> Tree:
        """`rate` is d (-1 before it is known), `least` the least change of ranks, `saved` the model of that round."""
        require_axes(self, round.net, round.net.axes)
        if self.rule != "fixed":
            require_curvature(self, round.net)
        return {"ranks": {}, "least": -1.0, "saved": dict(round.anchor), "rate": -1.0, "asking": False}

    # the rate of the largest device -----------------------------------------------------------------------------------
    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        messages: dict[int, dict] = {device: {} for device in round.devices}
        devices = [d for d in round.devices if d != SERVER]
        if devices:
            largest = max(devices, key=lambda d: round.sizes[d])
            messages[largest] = {"scores": REQUEST} | ({"rate": REQUEST} if state["asking"] else {})
        like = round.anchor[round.net.trainable[0]]
        for device, rates in self.compute_dropout_rates(state, round).items():
            messages[device]["scale"] = {a: torch.from_numpy(scale_kept_units(p)).to(like) for a, p in rates.items()}
        return messages, state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        report: dict = {}
        if device.has_request("scores"):
            batch = device.samples.take_batch(device.samples.index[: self.images])
            report["scores"] = measure_map_ranks(device.net, device.anchor, batch.inputs)
        if device.has_request("rate"):
            batch = device.samples.take_batch(device.samples.index[:100])
            d = estimate_held_rate(device, device.anchor, batch, self.rule, self.steps)
            report |= {} if d is None else {"rate": torch.tensor(d, device=device.net.place)}
        return report

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"scores": UNIT_SCORES, "rate": PRUNING_RATE}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        reports = [(r, r.report.get(self.name(), {})) for r in round.replies if r.device != SERVER]
        for d in (float(report["rate"]) for _, report in reports if "rate" in report):
            lower = d if state["rate"] < 0 else min(d, state["rate"])
            state = state | {"rate": lower, "asking": False}
        scores = [(1, report["scores"], r.plan) for r, report in reports if "scores" in report]
        if not scores:
            return params, state
        old, new = state["ranks"], average_neuron_scores(scores, state["ranks"])
        state = state | {"ranks": new}
        if not old:
            return params, state
        change = round_change(torch.cat([new[axis] - old[axis] for axis in new]).norm())
        if state["rate"] >= 0:
            if change < state["least"] and round.number <= self.until and self.rule != "fixed":
                state = state | {"asking": True, "least": change}
            return params, state
        if state["asking"]:
            return params, state
        if state["least"] < 0 or change < state["least"]:
            fell = state["least"] >= 0
            state = state | {"least": change, "saved": dict(round.anchor)}
            if fell:
                return params, state
        if round.number < self.start:
            return params, state
        state = state | ({"rate": self.rate} if self.rule == "fixed" else {"asking": True})
        back = {k: state["saved"][k] for k in round.net.names_with_role("shared")}
        return params | back, state

    # the sub-models ---------------------------------------------------------------------------------------------------
    def compute_dropout_rates(self, state: Tree, round: Round) -> dict[int, dict[str, np.ndarray]]:
        """By device and axis, the chance of each unit to drop out; nothing before d is known."""
        if state["rate"] < 0 or not state["ranks"]:
            return {}
        scores, groups = self.score_units(state, round), self.group_axes(round.net)
        devices = [d for d in round.devices if d != SERVER]
        rates: dict[int, dict[str, np.ndarray]] = {}
        for device, d_k in zip(devices, compute_rates_by_samples(round.sizes, devices, state["rate"], self.floor)):
            own = [compute_softmax_rates({a: scores[a] for a in group}, d_k) for group in groups]
            rates[device] = own[0] | own[1]
        return rates

    def score_units(self, state: Tree, round: Round) -> dict[str, np.ndarray]:
        """By axis: ranks where units have maps, else the sum of the absolute weights around a unit."""
        neurons = [a for a in (*round.net.axes, *list_rows_of_kinds(round.net, ("output",))) if not a.tap]
        sums = {name: own.cpu().numpy() for name, own in sum_adjacent_weights(neurons, round.anchor).items()}
        ranks = {a.name: state["ranks"][a.name].double().cpu().numpy() for a in round.net.axes if a.tap}
        return {name: own * self.score_scale for name, own in (ranks | sums).items()}

    def group_axes(self, net: Net) -> tuple[list[str], list[str]]:
        """The filters' axes, and those of neurons with the classes."""
        filters = [a.name for a in net.axes if a.tap]
        return filters, [a.name for a in (*net.axes, *list_rows_of_kinds(net, ("output",))) if a.name not in filters]

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        rates_by_device = self.compute_dropout_rates(state, round)
        scores = self.score_units(state, round) if rates_by_device else {}
        sub_models, dropped = dict(plans), []
        for device, rates in rates_by_device.items():
            generator = round.generator(f"device {device}")
            kept = {a: torch.from_numpy(draw_kept_neurons(p, scores[a], 0.0, generator)) for a, p in rates.items()}
            dropped.append(1 - sum(map(len, kept.values())) / sum(map(len, rates.values())))
            sub_models[device] = replace(plans[device], kept=kept)
        chosen = compute_rates_by_samples(round.sizes, list(rates_by_device), state["rate"], self.floor)
        round.tell("dropout_rate", fmean(chosen) if rates_by_device else 0.0)
        round.tell("dropped_share", fmean(dropped) if dropped else 0.0)
        return sub_models, state

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        """The weights and biases that make a unit times 1 / (1 - p)."""
        if "scale" not in local.got:
            return inner

        def score_scaled(params: Params, batch: Batch) -> BatchScore:
            return inner(local.net.slicer.scale_unit_weights(params, local.got["scale"]), batch)

        return score_scaled

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        """The mean over all devices; one that did not train a coordinate votes for its old value."""
        return average_replies(replace(round, replies=[fill_with_old_values(r, round) for r in replies])), state


def round_change(norm: torch.Tensor) -> float:
    """To three digits, as changes of ranks are compared in the code."""
    return float(f"{float(norm):.3f}")


def fill_with_old_values(reply: Reply, round: Round) -> Reply:
    """The reply with a change of 0 wherever it does not hold a coordinate."""
    delta = {
        k: torch.zeros_like(round.anchor[k])
        if k not in reply.delta
        else reply.delta[k] * reply.covered[k]
        if k in reply.covered
        else reply.delta[k]
        for k in round.net.names_with_role("shared")
    }
    return replace(reply, delta=delta, covered={})
