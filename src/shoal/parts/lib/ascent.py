"""Steps uphill of a given length, at whose end sharpness-aware methods take the gradient."""

from collections.abc import Collection

import torch
from torch import Tensor

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.model import tree
from shoal.core.model.tree import Params

SMALLEST = 1e-7
"""Added to norms that are divided by: a direction of 0 leads nowhere."""


def make_ascent_step(direction: Params, rho: float | Tensor, beside: Collection[str] = ()) -> Params:
    """rho * d / (|d| + 1e-7), with one norm over all tensors; 0 where d is 0. It works under `vmap`.

    Tensors `beside` the model (`list_side_tensors`) have a norm of their own, so that they change nothing of its step.
    """
    own = tree.select_params(direction, beside)
    if not own:
        return tree.scale_params(direction, rho / (compute_step_norm(direction) + SMALLEST))
    model = {k: d for k, d in direction.items() if k not in own}
    steps = make_ascent_step(model, rho) | make_ascent_step(own, rho)
    return {k: steps[k] for k in direction}


def make_adaptive_ascent_step(
    direction: Params, params: Params, rho: float | Tensor, floor: float | Tensor, beside: Collection[str] = ()
) -> Params:
    """rho * T^2 d / (|T d| + 1e-7), where T is |w| + floor for tensors with "weight" in their names, else 1."""
    scale = {k: p.abs() + floor for k, p in params.items() if "weight" in k}
    scaled = {k: d * scale[k] if k in scale else d for k, d in direction.items()}
    step = make_ascent_step(scaled, rho, beside)
    return {k: e * scale[k] if k in scale else e for k, e in step.items()}


def compute_step_norm(direction: Params) -> Tensor:
    """The 2-norm of all tensors together, in their own type, as a local step needs it."""
    return torch.stack([d.square().sum() for d in direction.values()]).sum().sqrt()


def compute_shifted_gradient(
    inner: GradientFunction, scorer: Scorer, params: Params, shift: Params, batch: Batch
) -> tuple[Params, BatchScore]:
    """The gradient at params + shift, and the score there; tensors without a shift stay."""
    return inner(scorer, params | {k: params[k] + e for k, e in shift.items()}, batch)
