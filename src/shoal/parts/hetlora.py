"""HetLoRA: every device trains adapters of a rank of its own (Cho et al. 2024, arXiv:2401.06432)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.aggregate import average_replies
from shoal.core.batch import Batch, BatchScore, Scorer
from shoal.core.errors import ShoalError
from shoal.core.metric import Metric
from shoal.core.model.low_rank import RANK_AXIS, Adapter, find_adapters
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import SERVER, Device, Local, Reply, Round
from shoal.parts.lib.adapter_products import compute_product_norm, read_factors, read_reply_model
from shoal.parts.lib.checks import require
from shoal.parts.lib.submodel_units import count_units_at_width, device_state_key, draw_tier, parse_levels


@dataclass(frozen=True)
class HetLoRA(Part):
    """Devices train the first r_k ranks of all adapters; replies weigh by the norm of B_k A_k.

    A device has for the whole run one of `rates` of the full rank. With `gamma` below 1 its loss has `lam` times
    |B_tail| |A_tail| for every adapter, the tail being its ranks beyond gamma r_k, and r_k falls to gamma r_k, rounded
    up, when that has become smaller in a round. `weights` is norm or size. Where `padded`, a rank that a device does
    not have counts as 0 in the mean; otherwise the mean of a rank is over the devices that have it.
    """

    cite: ClassVar = ("cho2024hetlora",)
    sets: ClassVar = frozenset({"plan", "weigh"})
    reads: ClassVar = frozenset({"updates"})
    needs_part: ClassVar = "lora"
    neutral: ClassVar = Neutral({"rates": "1", "gamma": 1.0, "weights": "size"})
    metrics: ClassVar = (
        Metric(
            "mean_rank",
            "rank, mean over devices",
            drawn=True,
            about="mean over the devices of a round of their rank r_k",
        ),
    )

    rates: str = "1,0.5,0.25"
    gamma: float = 1.0
    lam: float = 0.0
    weights: str = "norm"
    padded: bool = True

    def __post_init__(self):
        own = parse_levels(self.rates)
        right = bool(own) and 0 < own[0] <= own[-1] <= 1
        require(self, "rates such as '1,0.5,0.25', different and 0 < rate <= 1", right)
        require(self, "0 < gamma <= 1 and lam >= 0", 0 < self.gamma <= 1 and self.lam >= 0)
        require(self, "weights norm or size", self.weights in ("norm", "size"))

    def init_server(self, round: Round) -> Tree:
        """`ranks` holds those of devices whose rank has fallen."""
        find_rank_axis(round.net)
        return {"ranks": {}}

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        axis, levels = find_rank_axis(round.net), parse_levels(self.rates)
        ranks = {}
        for d in plans:
            first = count_units_at_width(axis.size, draw_tier(round.streams, self.name(), d, levels))
            ranks[d] = min(first, state["ranks"].get(device_state_key(d), first))
        round.tell("mean_rank", fmean(ranks[d] for d in plans if d != SERVER or len(plans) == 1))
        kept = {rank: {axis.name: torch.arange(rank)} for rank in set(ranks.values())}
        stays = self.gamma == 1
        return {d: replace(p, kept=kept[ranks[d]], known=stays, level=stays) for d, p in plans.items()}, state

    # self-pruning -----------------------------------------------------------------------------------------------------
    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """1 for the ranks that the device may lose, 0 for the others."""
        if not self.lam or self.gamma == 1:
            return params, {}
        axis, like = find_rank_axis(device.net), torch.empty(0, dtype=device.net.dtype, device=device.net.place)
        rank = count_ranks(device.plan, axis)
        unit = torch.arange(axis.size, device=device.net.place)
        return params, {"tail": {axis.name: ((unit >= count_ranks_left(rank, self.gamma)) & (unit < rank)).to(like)}}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        if "tail" not in local.state:
            return inner
        adapters = find_adapters(local.net.module)

        def score_with_tails(params: Params, batch: Batch) -> BatchScore:
            scored = inner(params, batch)
            tails = local.net.slicer.mask_units(params, local.state["tail"])
            norms = [measure_tail(tails, adapter) for adapter in adapters]
            return scored._replace(loss=scored.loss + self.lam * torch.stack(norms).sum())

        return score_with_tails

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """r_k <- gamma r_k, rounded up, where the sum of |B_tail| |A_tail| is smaller than in what was sent."""
        if self.gamma == 1:
            return params, state
        axis, adapters, ranks = find_rank_axis(round.net), find_adapters(round.net.module), dict(state["ranks"])
        for reply in round.replies:
            rank = count_ranks(reply.plan, axis)
            left = count_ranks_left(rank, self.gamma)
            if left < rank and reply.device != SERVER:
                anchor = reply.anchor or round.anchor
                models = (anchor, read_reply_model(reply, adapters, round))
                before, after = (measure_all_tails(model, left, rank, adapters, round.net) for model in models)
                if after < before:
                    ranks[device_state_key(reply.device)] = left
        return params, {"ranks": ranks}

    # aggregation ------------------------------------------------------------------------------------------------------
    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        """|B_k A_k|, the Frobenius norm over all adapters; equal weights where all are 0."""
        if self.weights == "size":
            return weights, state
        adapters = find_adapters(round.net.module)
        norms = [self.measure_reply(reply, adapters, round) for reply in round.replies]
        return torch.tensor(norms if any(norms) else [1.0] * len(norms), dtype=weights.dtype), state

    def measure_reply(self, reply: Reply, adapters: list[Adapter], round: Round) -> float:
        return compute_product_norm(read_reply_model(reply, adapters, round), adapters, round.net)

    def combine(self, replies, state: Tree, round: Round) -> tuple[Params, Tree]:
        """The mean over those that have a rank; where padded, times the weight of those that have it.

        A rank that no device of the round has keeps its values.
        """
        mean, axis = average_replies(round), find_rank_axis(round.net)
        if not self.padded:
            return mean, state
        share = torch.zeros(axis.size, dtype=round.net.dtype)
        for reply, weight in zip(round.replies, round.weights.tolist()):
            share[: count_ranks(reply.plan, axis)] += weight
        share = torch.where(share > 0, share, 1.0).to(round.net.place)
        return round.net.slicer.mask_units(mean, {axis.name: share}), state


def find_rank_axis(net: Net) -> Axis:
    """The axis of the ranks of all adapters; an error where there is none."""
    axis = next((axis for axis in net.axes if axis.name == RANK_AXIS), None)
    adapters = find_adapters(net.module)
    if axis and adapters:
        return axis
    if adapters:
        problem = (
            "hetlora gives devices adapters of their own ranks, and here A or B is not shared, or ranks differ already."
        )
        raise ShoalError("bad-part", problem, "Write lora(...) with a and b shared, and give all adapters one rank.")
    problem = "hetlora gives devices adapters of their own ranks, and this model has no adapters."
    raise ShoalError("bad-part", problem, "Write lora(...)+hetlora(...).")


def count_ranks(plan: Plan, axis: Axis) -> int:
    """r_k: how many ranks a plan keeps."""
    return len(plan.kept[axis.name]) if axis.name in plan.kept else axis.size


def count_ranks_left(rank: int, gamma: float) -> int:
    """How many ranks a device has after it lost its tail: at least one."""
    return max(1, ceil(gamma * rank - 1e-9))


def measure_tail(tails: Params, adapter: Adapter) -> Tensor:
    """|B_tail| |A_tail| of one adapter."""
    return tails[adapter.b].norm() * tails[adapter.a].norm()


def measure_all_tails(model: Params, first: int, end: int, adapters: list[Adapter], net: Net) -> float:
    """The sum of |B_tail| |A_tail| over all adapters of a model, for the ranks from `first` up to `end`."""
    factors = (read_factors(model, adapter, net) for adapter in adapters)
    return sum(float(b[:, first:end].norm() * a[first:end].norm()) for b, a in factors)
