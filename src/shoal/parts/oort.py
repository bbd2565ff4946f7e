"""Oort: devices that are useful and quick enough take part more often (Lai et al. 2021, arXiv:2010.06081)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.extras import Declaration, Extra
from shoal.core.learning_task import LearningTask
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import SERVER, Device, Local, Round
from shoal.parts.lib.checks import require
from shoal.parts.lib.device_seconds import estimate_reply_seconds, predict_seconds
from shoal.parts.lib.population_values import put_at_devices


@dataclass(frozen=True)
class Oort(Part):
    """Selects devices by n_k sqrt(mean loss^2), less for slow ones, and tries others that it does not know yet.

    A score is the utility, cut at the quantile `clip` and brought to 0 to 1, plus sqrt(0.1 ln(round) / last round of
    the device), times (T / t)^alpha where a device takes t > T seconds. T is a percentile of all known t, at first
    `percentile`; every `pace` rounds it moves by 5 points: up where the utility of known devices stays, down where it
    changes fivefold. Known devices are drawn by score among those with `cutoff` times the score that would just do.
    The share of devices never seen is `explore` times `decay` for each round, not below `least`.
    """

    cite: ClassVar = ("lai2021oort",)
    reads: ClassVar = frozenset({"extras", "outcomes", "sizes"})
    sets: ClassVar = frozenset({"select"})
    metrics: ClassVar = (
        Metric("utility", "mean utility that devices reported", drawn=True),
        Metric("new", "share of selected devices that were never seen", "share"),
        Metric("preferred_seconds", "time above which devices count less", "seconds", when="once times are known"),
    )

    alpha: float = 2.0
    explore: float = 0.9
    decay: float = 0.95
    least: float = 0.2
    clip: float = 0.98
    cutoff: float = 0.7
    percentile: float = 10.0
    pace: int = 20

    def __post_init__(self):
        require(self, "alpha >= 0 and pace >= 1", self.alpha >= 0 and self.pace >= 1)
        require(self, "0 < percentile <= 100", 0 < self.percentile <= 100)
        shares = (self.explore, self.decay, self.least, self.clip, self.cutoff)
        require(self, "explore, decay, least, clip and cutoff from 0 to 1", all(0 <= s <= 1 for s in shares))

    def init_server(self, round: Round) -> Tree:
        none = torch.zeros(round.population, dtype=torch.float64)
        known = {"utility": none, "seconds": none, "last": none}
        return {"known": known, "percentile": self.percentile, "exploited": [], "gained": 0.0, "gained_before": 0.0}

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        utility, seconds, last = (state["known"][k].cpu().numpy() for k in ("utility", "seconds", "last"))
        eligible, number = round.eligible, round.number + 1
        known, new = eligible[last[eligible] > 0], eligible[last[eligible] == 0]
        preferred = np.percentile(seconds[last > 0], state["percentile"]) if (last > 0).any() else np.inf
        if np.isfinite(preferred):
            round.tell("preferred_seconds", float(preferred))
        wanted_new = int(round.sample * max(self.least, self.explore * self.decay**round.number) + 0.5)
        exploit = min(len(known), round.sample - min(len(new), wanted_new))
        scores = score_devices(utility[known], last[known], number, self.clip)
        scores = scores * slow_down(seconds[known], preferred, self.alpha)
        exploited = draw_best(known, scores, exploit, round.generator("exploit"), least=self.cutoff)
        times = np.array([predict_seconds(int(d), round) for d in new])
        chances = round.sizes[new] * slow_down(times, preferred, self.alpha)
        explored = draw_best(new, chances, round.sample - exploit, round.generator("explore"), among=5)
        round.tell("new", len(explored) / max(1, len(explored) + len(exploited)))
        return sorted([*exploited, *explored]), state | {"exploited": exploited}

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        none = torch.zeros((), dtype=device.net.dtype, device=device.net.place)
        return params, {"squares": none, "samples": none}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        def score_with_squares(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            squares, samples = sum_squared_losses(local.net.task, scored.logits.detach(), batch)
            return scored._replace(aux=scored.aux | {"oort squares": squares, "oort samples": samples})

        return score_with_squares

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        squares, samples = scored.aux["oort squares"], scored.aux["oort samples"]
        return update, {"squares": state["squares"] + squares, "samples": state["samples"] + samples}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        trained = state["samples"].clamp(max=float(device.numbers["size"]))
        return {"utility": (trained * (state["squares"] / state["samples"].clamp(min=1)).sqrt()).float()}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"utility": Extra(low=0, about="its samples times the root of their mean squared loss")}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        replies = [r for r in round.replies if r.device != SERVER]
        devices, number = [r.device for r in replies], round.number + 1
        utility = [float(r.report[self.name()]["utility"]) for r in replies]
        news = {
            "utility": utility,
            "seconds": [estimate_reply_seconds(r, round) for r in replies],
            "last": [float(number)] * len(replies),
        }
        known = {k: put_at_devices(v, devices, news[k]) for k, v in state["known"].items()}
        gained = state["gained"] + sum(u for d, u in zip(devices, utility) if d in state["exploited"])
        state = state | {"known": known, "gained": gained}
        return params, self.set_pace(state, number) if number % self.pace == 0 else state

    def set_pace(self, state: Tree, number: int) -> Tree:
        """The state after `pace` more rounds: a new percentile where what was gained stays, or leaps."""
        now, before, percentile = state["gained"], state["gained_before"], state["percentile"]
        if number >= 2 * self.pace and abs(now - before) <= 0.1 * before:
            percentile = min(100.0, percentile + 5)
        elif number >= 2 * self.pace and abs(now - before) >= 5 * before:
            percentile = max(5.0, percentile - 5)
        return state | {"percentile": percentile, "gained": 0.0, "gained_before": now}


def score_devices(utility: np.ndarray, last: np.ndarray, number: int, clip: float) -> np.ndarray:
    """Utilities brought to 0 to 1, plus a bonus for devices that were not seen for long; rounds count from 1."""
    if not len(utility):
        return utility
    capped = np.minimum(utility, np.quantile(utility, clip))
    low = 0.999 * capped.min()
    # 1e-4: all utilities may be the same
    return (capped - low) / max(capped.max() - low, 1e-4) + np.sqrt(0.1 * log(number) / last)


def slow_down(seconds: np.ndarray, preferred: float, alpha: float) -> np.ndarray:
    """What a device counts for its time: 1, or (T / t)^alpha where it takes longer than T."""
    return (preferred / np.maximum(seconds, preferred)) ** alpha if 0 < preferred < np.inf else np.ones(len(seconds))


def draw_best(
    devices: np.ndarray, scores: np.ndarray, count: int, draw: np.random.Generator, least: float = 0.0, among: int = 0
) -> list[int]:
    """`count` of the devices, drawn by score from those with `least` times the score of the last that would do.

    With `among`, from as many times `count`, the best.
    """
    count = min(count, len(devices))
    if count <= 0:
        return []
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= least * scores[order[count - 1]]][: among * count or None]
    chances = scores[order] + 1e-12  # a device may have no score at all
    return devices[draw.choice(order, count, replace=False, p=chances / chances.sum())].tolist()


def sum_squared_losses(task: LearningTask, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The sum of the squared losses of the samples of a batch, and how many they are, without padding."""
    losses = torch.zeros(logits.shape[0], dtype=logits.dtype, device=logits.device)
    for targets, weight in batch.targets:
        own = task.compute_sample_losses(logits, targets, batch.weight)
        losses = losses + (own if weight is None else own * weight)
    there = torch.ones_like(losses) if batch.weight is None else batch.weight.to(losses.dtype)
    return (losses.square() * there).sum(), there.sum()
