"""FedAD: slow devices train sub-models without the filters and neurons that matter least.

Liu et al. 2025, arXiv:2507.10430: section 5.2.1 and Algorithm 2, whose order this file follows. Its symbols:

    R^t, r^i    the score of every unit (rank of a filter's maps, weight of a neuron), and of unit i
    Delta^t     |R^t - R^(t-h)|, the change of the scores since they were last taken
    d_k, d_avg  the dropout rate that the curvature on device k allows, and the mean over devices
    ET_k        the time that device k takes for a round with the whole model
    d_k*, d_k^i the dropout rate of device k, and that of its unit i
    m_k^i       the mask: 1 / (1 - d_k^i) where unit i is kept, 0 where it drops out
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.extras import Declaration
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Local, Round
from shoal.core.wire import REQUEST
from shoal.parts.lib.checks import require, require_axes, require_curvature
from shoal.parts.lib.curvature import PRUNING_RATE, RULES, estimate_held_rate
from shoal.parts.lib.dropout_rates import (
    compute_device_rates,
    compute_neuron_rates,
    draw_kept_neurons,
    estimate_device_seconds,
)
from shoal.parts.lib.unit_scores import UNIT_SCORES, average_neuron_scores, score_neurons

MANY = 10**9


@dataclass(frozen=True)
class FedAD(Part):
    """Slow devices train sub-models: each unit drops out by chance, the more often the less it matters.

    Every `check` rounds (h) devices report the scores R_k of their units, on `images` samples. The rates are updated
    for the first time when the change of the scores has not fallen for `patience` rounds (the paper's C), at the latest
    in round `force`, and again whenever the change is smaller than at the last update. Devices then report d_k by
    `rule`: `slq_plateau` and `eigen_gap` read it from the curvature of their loss after `steps` Lanczos steps, and
    `fixed` takes d_avg = `rate` without asking them. `direction` is how d_k* follows from d_avg: `corrected` reads the
    printed expressions as what is kept, `literal` as what is dropped. No unit has a higher rate than `most`, and of
    every layer the share `least` is always kept.
    """

    cite: ClassVar = ("liu2025feddhad",)
    metrics: ClassVar = (
        Metric(
            "dropout_rate",
            "dropout rate, mean over devices",
            "share",
            drawn=True,
            about="mean over the devices of a round of the mean rate of their units; 0 before the first update",
        ),
        Metric(
            "largest_rate",
            "highest dropout rate of a device",
            "share",
            drawn=True,
            about="the same of the device with the highest rate, which is the slowest",
        ),
    )
    reads: ClassVar = frozenset({"extras", "sizes"})
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
        """`scores` is R, `rate` d_avg (-1 before the first update), `change` Delta at the last update."""
        require_axes(self, round.net, round.net.axes)
        if self.rule != "fixed":
            require_curvature(self, round.net)
        return {"scores": {}, "rate": -1.0, "asking": False, "change": -1.0, "best": -1.0, "since": 0}

    # Algorithm 2, lines 1-14: the update of the dropout rates ---------------------------------------------------------
    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        """Requests for R_k and d_k where they are due, and the scale 1 / (1 - d_k^i) of each device's units."""
        requests = {"scores": REQUEST} if round.number % self.check == 0 else {}
        requests |= {"rate": REQUEST} if state["asking"] else {}
        messages: dict[int, dict] = {device: dict(requests) for device in round.devices}
        like = round.anchor[round.net.trainable[0]]
        for device, rates in self.compute_dropout_rates(state, round).items():
            messages[device]["scale"] = {axis: torch.from_numpy(1 / (1 - d)).to(like) for axis, d in rates.items()}
        return messages, state

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        """On a device: R_k (line 3) and d_k (line 4), where the server asked for them."""
        report: dict = {}
        if not (device.has_request("scores") or device.has_request("rate")):
            return report
        batch = device.samples.take_batch(device.samples.index[: self.images])
        if device.has_request("scores"):
            report["scores"] = score_neurons(device.net, device.anchor, batch.inputs)
        if device.has_request("rate"):
            d_k = estimate_held_rate(device, params, batch, self.rule, self.steps)
            report |= {} if d_k is None else {"rate": torch.tensor(d_k, device=device.net.place)}
        return report

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"scores": UNIT_SCORES, "rate": PRUNING_RATE}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """On the server: d_avg = sum n_k d_k / sum n_k, and the aggregated R (line 7)."""
        reports = [(r, r.report.get(self.name(), {})) for r in round.replies if r.device != SERVER]
        rates = [(r.size, float(report["rate"])) for r, report in reports if "rate" in report]
        if rates:
            d_avg = sum(n * d for n, d in rates) / sum(n for n, _ in rates)
            state = state | {"rate": d_avg, "asking": False}
        scores = [(r.size, report["scores"], r.plan) for r, report in reports if "scores" in report]
        if scores:
            state = self.track_score_change(state, average_neuron_scores(scores, state["scores"]), round.number)
        return params, state

    def track_score_change(self, state: Tree, new: dict[str, Tensor], number: int) -> Tree:
        """The state with the new scores R^t, and a request for rates if line 1 says that they should be updated."""
        old, due = state["scores"], number >= self.force and state["rate"] < 0
        state = state | {"scores": new}
        if old:
            change = float(torch.cat([new[axis] - old[axis] for axis in new]).norm())
            if state["rate"] >= 0:
                due = change < state["change"]
            elif state["best"] < 0 or change < state["best"] * (1 - 1e-3):  # less than 0.1 % is noise, not a decrease
                state = state | {"best": change, "since": number}
            else:
                due |= number - state["since"] >= self.patience
            state = state | ({"change": change} if due else {})
        if not due:
            return state
        return state | ({"rate": self.rate} if self.rule == "fixed" else {"asking": True})

    def compute_dropout_rates(self, state: Tree, round: Round) -> dict[int, dict[str, np.ndarray]]:
        """By device and axis, d_k^i of each unit (lines 6 and 8-13); nothing before the first update."""
        devices = [d for d in round.devices if d != SERVER]
        if state["rate"] < 0 or not state["scores"]:
            return {}
        d_star = compute_device_rates(
            estimate_device_seconds(round, devices), state["rate"], self.direction == "literal"
        )
        scores = {axis: r.cpu().numpy() for axis, r in state["scores"].items()}
        has_maps = {axis.name: bool(axis.tap) for axis in round.net.axes}
        rates: dict[int, dict[str, np.ndarray]] = {}
        for device, d_k in zip(devices, d_star.tolist()):
            # convolutional layers (CL) and fully connected ones (FL) separately: their scores have different scales
            groups = [{a: r for a, r in scores.items() if has_maps[a] == maps} for maps in (True, False)]
            filters, neurons = (compute_neuron_rates(group, d_k, self.most) for group in groups)
            rates[device] = filters | neurons
        return rates

    # Algorithm 2, lines 15-20: the dropout operation ------------------------------------------------------------------
    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        """The units whose mask m_k^i is not 0 (line 17), drawn anew for every device and round."""
        scores = {axis: r.cpu().numpy() for axis, r in state["scores"].items()}
        sub_models, rates_by_device = dict(plans), self.compute_dropout_rates(state, round)
        mean_rates = [float(np.concatenate(list(rates.values())).mean()) for rates in rates_by_device.values()]
        round.tell("dropout_rate", fmean(mean_rates) if mean_rates else 0.0)
        round.tell("largest_rate", max(mean_rates, default=0.0))
        for device, rates in rates_by_device.items():
            generator = round.generator(f"device {device}")
            kept = {
                a: torch.from_numpy(draw_kept_neurons(d, scores[a], self.least, generator)) for a, d in rates.items()
            }
            sub_models[device] = replace(plans[device], kept=kept)
        return sub_models, state

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        """The loss of the sub-model (line 19): the outputs of kept units times 1 / (1 - d_k^i), weights unscaled."""
        if "scale" not in local.got:
            return inner

        def score_scaled(params: Params, batch: Batch) -> BatchScore:
            return inner(local.net.slicer.scale_unit_outputs(params, local.got["scale"]), batch)

        return score_scaled
