"""FedSpeed: sharpness-aware steps, held by what a device did before (Sun et al. 2023, arXiv:2302.10429)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.metric import Metric
from shoal.core.model import tree
from shoal.core.model.heads import list_side_tensors
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.ascent import compute_shifted_gradient, make_ascent_step
from shoal.parts.lib.change_sums import (
    add_dynamic_pull,
    extend_change_sum,
    extend_mean_change_sum,
    recall_change_sum,
)
from shoal.parts.lib.checks import require, require_no_momentum
from shoal.parts.lib.tensor_norms import compute_norm

OVERS = ("all", "round")


@dataclass(frozen=True)
class FedSpeed(Part):
    """A step goes along a gradient taken uphill plus lam (w - anchor + h_k), h_k summing a device's past changes.

    The gradient is (1 - alpha) g(w) + alpha g(w + e) with e = rho g / (norm of g). The model that is broadcast, and
    judged, is the plain mean of the replies plus a mean of the h_k.

    `rho` is how far uphill, `alpha` how much the gradient there counts, `lam` the strength of the pull.
    `normalised=False` makes the step uphill rho g, as the paper writes it. `over` is which h_k the server adds: the
    mean over `all` devices, or over those of the `round`, which then return w_k + h_k.
    """

    cite: ClassVar = ("sun2023fedspeed",)
    perturbs_gradient: ClassVar = True
    needs_whole: ClassVar = True
    assumes_sgd: ClassVar = True
    corrects_steps: ClassVar = True
    metrics: ClassVar = (
        Metric(
            "h_norm",
            "norm of the mean correction h",
            drawn=True,
            when="with `over='all'`",
            about="2-norm of the mean over all devices of the sums of their past changes",
        ),
    )
    reads: ClassVar = frozenset({"sizes", "updates"})
    sets: ClassVar = frozenset({"weigh"})

    lam: float = 0.1
    rho: float = 0.1
    alpha: float = 1.0
    normalised: bool = True
    over: str = "all"

    def __post_init__(self):
        require(self, "lam >= 0 and rho >= 0", self.lam >= 0 and self.rho >= 0)
        require(self, "0 <= alpha <= 1", 0 <= self.alpha <= 1)
        require(self, f"over in {OVERS}", self.over in OVERS)

    def init_server(self, round: Round) -> Tree:
        require_no_momentum(self, round, "its correction h_k is made of plain steps")
        return {"h": tree.make_zeros(tree.select_params(round.anchor, round.net.shared_trainable))}

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"h": recall_change_sum(memory, params, device)}

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        beside = list_side_tensors(local.net)

        def compute_uphill(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            slope, scored = inner(scorer, params, batch)
            ascent = (
                make_ascent_step(slope, self.rho, beside) if self.normalised else tree.scale_params(slope, self.rho)
            )
            above, _ = compute_shifted_gradient(inner, scorer, params, ascent, batch)
            mixed = {k: (1 - self.alpha) * slope[k] + self.alpha * above[k] for k in slope}
            return add_dynamic_pull(mixed, params, local.anchor, local.state["h"], self.lam), scored

        return compute_uphill

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        h = extend_change_sum(state["h"], params, device)
        return (params | {k: params[k] + v for k, v in h.items()} if self.over == "round" else params), {"h": h}

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        return (weights > 0).to(weights.dtype), state

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        if self.over == "round":
            return params, state
        h = extend_mean_change_sum(state["h"], round)
        round.tell("h_norm", compute_norm(h))
        return params | {k: params[k] + v for k, v in h.items()}, {"h": h}
