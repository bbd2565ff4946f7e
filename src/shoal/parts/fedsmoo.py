"""FedSMOO: devices agree on where uphill is, and on where the optimum is (Sun et al. 2023, arXiv:2305.11584)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.extras import Declaration, Extra
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.heads import list_side_tensors
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.ascent import compute_shifted_gradient, compute_step_norm, make_ascent_step
from shoal.parts.lib.change_sums import (
    add_dynamic_pull,
    extend_change_sum,
    extend_mean_change_sum,
    recall_change_sum,
)
from shoal.parts.lib.checks import require, require_no_momentum
from shoal.parts.lib.reply_means import average_trees
from shoal.parts.lib.tensor_norms import compute_norm

AGREED = 1e-6
"""A mean of the mu_k below this share of rho is 0: only rounding gives it a direction."""


@dataclass(frozen=True)
class FedSMOO(Part):
    """FedSpeed's step, with a step uphill along g - mu_k - s, by which devices agree on the way uphill.

    e = rho d / (norm of d) with d = g - mu_k - s, and mu_k = mu_k + e - s after every step. s is rho long and goes
    along the mean mu_k of the last round; it is 0 where that mean is 0. The step goes along g(w + e) plus
    lam (w - anchor + h_k), h_k being the sum of a device's past changes. The model that is broadcast, and judged, is
    the plain mean of the replies plus the mean h_k of all devices.

    `rho` is how far uphill, `lam` the strength of the pull.
    """

    cite: ClassVar = ("sun2023fedsmoo",)
    perturbs_gradient: ClassVar = True
    needs_whole: ClassVar = True
    assumes_sgd: ClassVar = True
    corrects_steps: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "mu_ratio",
            "norm of mu_k over that of the gradient",
            on_device=True,
            drawn=True,
            when="in rounds of the interval `eval_every`",
            about="2-norm of mu_k over that of the last gradient, mean over devices; above 1 mu_k leads the way uphill",
        ),
        Metric("s_norm", "norm of s", about="2-norm of s after the round: rho, or 0"),
        Metric(
            "h_norm",
            "norm of the mean correction h",
            drawn=True,
            about="2-norm of the mean over all devices of the sums of their past changes",
        ),
    )
    reads: ClassVar = frozenset({"sizes", "updates", "extras"})
    sets: ClassVar = frozenset({"weigh"})

    lam: float = 0.1
    rho: float = 0.1

    def __post_init__(self):
        require(self, "lam >= 0 and rho >= 0", self.lam >= 0 and self.rho >= 0)

    def init_server(self, round: Round) -> Tree:
        require_no_momentum(self, round, "its correction h_k is made of plain steps")
        own = tree.select_params(round.anchor, round.net.shared_trainable)
        return {"h": tree.make_zeros(own), "s": tree.make_zeros(own)}

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        return {d: {"s": state["s"]} for d in round.devices}, state

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        h = recall_change_sum(memory, params, device)
        unknown = torch.zeros((), dtype=device.net.dtype, device=device.net.place)
        return params, {"h": h, "mu": memory.get("mu") or tree.make_zeros(h), "g_norm": unknown}

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        mu, s, beside = local.state["mu"], local.got["s"], list_side_tensors(local.net)

        def compute_uphill(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            slope, scored = inner(scorer, params, batch)
            direction = slope | {k: slope[k] - m - s[k] for k, m in mu.items()}
            ascent = make_ascent_step(direction, self.rho, beside)
            above, _ = compute_shifted_gradient(inner, scorer, params, ascent, batch)
            aux = {make_aux_key(k): ascent[k] for k in mu} | {make_aux_key(""): compute_step_norm(slope)}
            pulled = add_dynamic_pull(above, params, local.anchor, local.state["h"], self.lam)
            return pulled, scored._replace(aux=scored.aux | aux)

        return compute_uphill

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        mu = {k: m + scored.aux[make_aux_key(k)] - local.got["s"][k] for k, m in state["mu"].items()}
        return update, state | {"mu": mu, "g_norm": scored.aux[make_aux_key("")]}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        device.tell("mu_ratio", compute_norm(state["mu"]) / state["g_norm"])
        return params, {"h": extend_change_sum(state["h"], params, device), "mu": state["mu"]}

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        return {"mu": state["mu"]}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration:
        return {"mu": Extra("params", crowd="mean", about="the sum of its past steps uphill, less what was agreed on")}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return (weights > 0).to(weights.dtype), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        h = extend_mean_change_sum(state["h"], round)
        mean = average_trees([reply.report[self.name()]["mu"] for reply in round.replies], round)
        norm = float(compute_norm(mean))
        s = tree.scale_params(mean, self.rho / norm if norm > AGREED * self.rho else 0.0)
        round.tell("s_norm", compute_norm(s))
        round.tell("h_norm", compute_norm(h))
        return params | {k: params[k] + v for k, v in h.items()}, {"h": h, "s": s}


def make_aux_key(name: str) -> str:
    """Under which key of `BatchScore.aux` a tensor's step uphill goes from `gradient` to `step`; "": the norm of g."""
    return f"fedsmoo.{name}"
