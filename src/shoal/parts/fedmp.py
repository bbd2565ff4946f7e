"""FedMP: a bandit finds how much of the model each device prunes (Jiang et al., ICDE 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.batch import BatchScore
from shoal.core.extras import Declaration, Extra
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.streams import part_stream_name
from shoal.core.types import SERVER, Device, Local, Reply, Round
from shoal.parts.lib.checks import require, require_axes
from shoal.parts.lib.device_seconds import estimate_reply_seconds
from shoal.parts.lib.submodel_units import compute_unit_strengths, count_units_left, device_state_key, parse_levels


@dataclass(frozen=True)
class FedMP(Part):
    """A bandit for each device finds how much of the model it prunes; it trains the units with the largest weights.

    An arm is rewarded with the fall of the loss, the more so the nearer the device's time is to the mean of all. What a
    device does not hold counts with its old value when replies are combined (R2SP).

    `arms` lists the shares that can be pruned. `explore` weighs the bonus of arms that were tried seldom, and
    `discount` is what earlier rewards count for in each next round.
    """

    cite: ClassVar = ("jiang2022fedmp",)
    reads: ClassVar = frozenset({"extras", "outcomes", "updates"})
    sets: ClassVar = frozenset({"plan"})
    neutral: ClassVar = Neutral({"arms": "0"})

    arms: str = "0,0.2,0.4,0.6"
    explore: float = 0.1
    discount: float = 0.95

    def __post_init__(self):
        own = parse_levels(self.arms)
        require(self, "arms such as '0,0.2,0.4', different and 0 <= arm < 1", bool(own) and 0 <= own[0] <= own[-1] < 1)
        require(self, "explore >= 0 and 0 < discount <= 1", self.explore >= 0 and 0 < self.discount <= 1)

    def init_server(self, round: Round) -> Tree:
        require_axes(self, round.net, round.net.axes)
        return {}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        ratios, ranks = parse_levels(self.arms), compute_unit_strengths(round.net, round.anchor)
        none = torch.zeros(len(ratios), dtype=torch.float64)
        bandits = {d: state.get(device_state_key(d), {"tried": none, "total": none}) for d in plans if d != SERVER}
        arms = {d: self.pull_arm(own["tried"], own["total"], round, d) for d, own in bandits.items()}
        kept = {arm: keep_strongest_units(ranks, ratios[arm]) for arm in set(arms.values())}
        sub_models = {d: replace(plans[d], kept=kept[arm]) for d, arm in arms.items()}
        return dict(plans) | sub_models, state | {
            device_state_key(d): own | {"arm": arms[d]} for d, own in bandits.items()
        }

    def pull_arm(self, tried: Tensor, total: Tensor, round: Round, device: int) -> int:
        """The arm with the highest bound; those never tried come first, by chance."""
        new = (tried == 0).nonzero().flatten().tolist()
        if new:
            draw = round.streams.make_numpy_generator(part_stream_name(self.name()), round.number, device)
            return new[int(draw.integers(len(new)))]
        doubt = (2 * max(log(float(tried.sum())), 0.0) / tried).sqrt()
        return int((total / tried + self.explore * doubt).argmax())

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        none = torch.zeros((), dtype=device.net.dtype, device=device.net.place)
        return params, {"first": none, "second": none}

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        early = (2 * local.numbers["step"] < local.numbers["steps"]).to(scored.loss.dtype)
        first, second = state["first"] + early * scored.loss, state["second"] + (1 - early) * scored.loss
        return update, {"first": first, "second": second}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"fall": compute_loss_fall(state, int(device.numbers["steps"])).float()}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"fall": Extra(low=-1, high=1, about="how much the loss fell, relative to itself")}

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        """A reply's change is 0 where it has none: there it stands for the old value, and counts."""
        return average_replies(replace(round, replies=[replace(r, covered={}) for r in replies])), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        rewards, bandits = self.compute_rewards(round), {}
        for device in round.devices:
            if device != SERVER:
                bandit = state[device_state_key(device)]
                pulled = torch.zeros_like(bandit["tried"]).index_fill(0, torch.tensor(bandit["arm"]), 1.0)
                tried = self.discount * bandit["tried"] + pulled
                total = self.discount * bandit["total"] + pulled * rewards.get(device, 0.0)
                bandits[device_state_key(device)] = bandit | {"tried": tried, "total": total}
        return params, state | bandits

    def compute_rewards(self, round: Round) -> dict[int, float]:
        """Of the devices that answered: the fall of the loss over 1 plus the relative distance from the mean time."""
        falls = {r.device: float(r.report[self.name()]["fall"]) for r in round.replies if r.device != SERVER}
        times = {r.device: estimate_reply_seconds(r, round) for r in round.replies if r.device != SERVER}
        # 1e-12: a fleet may take no time at all
        mean = max(sum(times.values()) / max(len(times), 1), 1e-12)
        return {d: own / (1 + abs(times[d] - mean) / mean) for d, own in falls.items()}


def keep_strongest_units(ranks: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """The units of each axis with the largest norms, in order."""
    counts = {name: count_units_left(len(own), ratio) for name, own in ranks.items()}
    return {
        name: own.argsort(descending=True, stable=True)[: counts[name]].sort().values for name, own in ranks.items()
    }


def compute_loss_fall(state: Tree, steps: int) -> Tensor:
    """How much lower the loss was in the second half of the local run than in the first, relative to that."""
    early = (steps + 1) // 2
    first, second = state["first"] / early, state["second"] / max(steps - early, 1)
    # bounded, since a loss near 0 changes by any factor; one step has no second half
    return ((first - second) / first.abs().clamp(min=1e-12)).clamp(-1, 1) * float(steps > 1)
