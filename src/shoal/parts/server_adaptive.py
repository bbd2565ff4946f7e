"""Adaptive server optimisers: Adam and Yogi on the mean update (Reddi et al. 2021, arXiv:2003.00295)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class FedAdam(Part):
    """The server takes Adam steps along the mean update.

    With d = mean - anchor, m = beta1 m + (1 - beta1) d and v = beta2 v + (1 - beta2) d^2, the new model is anchor + lr
    m / (sqrt(v) + tau).
    """

    cite: ClassVar = ("reddi2021fedopt",)

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001

    def __post_init__(self):
        check_settings(self)

    def init_server(self, round: Round) -> Tree:
        return init_moments(round, self.tau)

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        return apply_adaptive_step(self, params, state, round, lambda v, d2: self.beta2 * v + (1 - self.beta2) * d2)


@dataclass(frozen=True)
class FedYogi(Part):
    """The server takes Yogi steps along the mean update.

    They are those of FedAdam, with `beta1` for m, except that v = v - (1 - beta2) d^2 sign(v - d^2): v moves towards
    d^2 by a step whose size does not depend on how far it is. The new model is anchor + lr m / (sqrt(v) + tau).
    """

    cite: ClassVar = ("reddi2021fedopt",)

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 0.001

    def __post_init__(self):
        check_settings(self)

    def init_server(self, round: Round) -> Tree:
        return init_moments(round, self.tau)

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        return apply_adaptive_step(
            self, params, state, round, lambda v, d2: v - (1 - self.beta2) * d2 * (v - d2).sign()
        )


def check_settings(part: FedAdam | FedYogi) -> None:
    holds = part.lr > 0 and 0 <= part.beta1 < 1 and 0 <= part.beta2 < 1 and part.tau > 0
    require(part, "lr > 0, 0 <= beta1 < 1, 0 <= beta2 < 1 and tau > 0", holds)


def init_moments(round: Round, tau: float) -> Tree:
    """m starts at 0, v at tau^2."""
    own = tree.select_params(round.anchor, round.net.shared_trainable)
    return {"m": tree.make_zeros(own), "v": {k: torch.full_like(p, tau**2) for k, p in own.items()}}


def apply_adaptive_step(
    part: FedAdam | FedYogi, params: Params, state: Tree, round: Round, second
) -> tuple[Params, Tree]:
    """The step that both take; `second` says how v follows the squared update."""
    d: dict[str, Tensor] = {k: params[k] - round.anchor[k] for k in state["m"]}
    m = {k: part.beta1 * m + (1 - part.beta1) * d[k] for k, m in state["m"].items()}
    v = {k: second(v, d[k].square()) for k, v in state["v"].items()}
    moved = {k: round.anchor[k] + part.lr * m[k] / (v[k].sqrt() + part.tau) for k in d}
    return params | moved, {"m": m, "v": v}
