"""pFedMe: local steps follow the Moreau envelope of the loss (Dinh et al. 2020, arXiv:2006.08848)."""

from dataclasses import dataclass
from typing import ClassVar

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Device, Local, Round
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class PFedMe(Part):
    """A step goes along lam (w - theta), where theta nearly minimises F(theta) + lam/2 (theta - w)^2 on its batch.

    theta makes `inner_steps` steps of rate `inner_lr`, from w, or with `warm` from where the batch before left it. It
    is the model that a device uses. `lam` is how strongly theta is pulled to w. The server moves by `beta` times the
    mean update.
    """

    cite: ClassVar = ("dinh2020pfedme",)
    replaces_gradient: ClassVar = True
    needs_whole: ClassVar = True

    lam: float = 15.0
    inner_steps: int = 5
    inner_lr: float = 0.05
    beta: float = 1.0
    warm: bool = False

    def __post_init__(self):
        require(self, "lam, inner_lr and beta >= 0", min(self.lam, self.inner_lr, self.beta) >= 0)
        require(self, "inner_steps from 1 to 1,000", 1 <= self.inner_steps <= 1000)

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"theta": tree.select_params(params, device.net.trainable)}

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        def compute_envelope_gradient(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
            theta, first = local.state["theta"] if self.warm else params, None
            for _ in range(self.inner_steps):
                gradient, scored = inner(scorer, theta, batch)
                first = first or scored
                theta = {k: t - self.inner_lr * (gradient[k] + self.lam * (t - params[k])) for k, t in theta.items()}
            assert first is not None
            told = {name_theta_aux(k): t for k, t in theta.items()}
            return {k: self.lam * (p - theta[k]) for k, p in params.items()}, first._replace(aux=first.aux | told)

        return compute_envelope_gradient

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        return update, {"theta": {k: scored.aux[name_theta_aux(k)] for k in state["theta"]}}

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        return params, {"theta": state["theta"]}

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        if self.beta == 1.0:
            return params, state
        anchor = round.anchor
        moved = {k: anchor[k] + self.beta * (params[k] - anchor[k]) for k in round.net.shared_trainable}
        return params | moved, state

    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        return params | memory.get("theta", {})


def name_theta_aux(name: str) -> str:
    """Under which name `gradient` hands a tensor of theta to `step`."""
    return f"pfedme {name}"
