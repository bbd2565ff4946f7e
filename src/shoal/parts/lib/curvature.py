"""The curvature of a loss, and the share of a model that it says can be pruned or dropped (FedAD, FedAP, IMC).

The Hessian H is never formed: Lanczos steps with Hessian-vector products give a few Ritz values and their weights,
which stand for the whole spectrum. `eigen_gap` is the rule that the papers print, m_k / h_k with the first m_k for
which lambda_(m+1) - lambda_m > 4 L_k; `slq_plateau` is what the code of FedDUAP's authors does.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Batch
from shoal.core.extras import Extra
from shoal.core.model.kernels import use_differentiable_kernels
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.types import Device

PRUNING_RATE = Extra(
    low=0, high=1, when="rate", optional=True, about="the share of the model that its curvature lets go"
)
"""What a device reports where `rate` is requested; nothing where the curvature is not finite."""
RULES = ("slq_plateau", "eigen_gap", "fixed")
"""How a rate is found; `fixed` needs no spectrum."""
MAX_PRUNING_RATE = 0.8
"""No rule gives a higher rate."""
BINS, MARGIN, VARIANCE, PLATEAU_TOLERANCE = 10_000, 0.01, 1e-5, 0.005
"""Of the smoothed spectrum, as in the code of FedDUAP's authors (PaddleFL, fedDUAP/flearn/utils/prune.py)."""


class Spectrum(NamedTuple):
    """Ritz values in ascending order, and their weights, which sum to 1."""

    values: np.ndarray
    weights: np.ndarray


class FlatLoss:
    """The loss of a model on one batch as a function of one flat vector; `held` are the elements that may move."""

    def __init__(self, net: Net, params: Params, batch: Batch, held: Tensor | None = None):
        self.net, self.params, self.batch = net, params, batch
        self.names = net.shared_trainable
        self.held = held

    def flatten(self, params: Params) -> Tensor:
        """The trained tensors as one vector, without gradients."""
        return torch.cat([params[k].detach().flatten() for k in self.names])

    def compute_gradient(self, at: Tensor, graph: bool = False) -> tuple[Tensor, Tensor]:
        """The point `at` as a leaf, and the gradient of the loss there; with `graph` it can be differentiated again."""
        leaf = at.detach().requires_grad_()
        pieces = leaf.split([self.params[k].numel() for k in self.names])
        params = {k: piece.view(self.params[k].shape) for k, piece in zip(self.names, pieces)}
        with use_differentiable_kernels(self.net.module, self.net.place, twice=graph):
            loss = self.net.task.compute_mean_loss(
                self.net.forward(self.params | params, self.batch.inputs)[0], self.batch
            )
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=graph)
        return leaf, gradient if self.held is None else gradient * self.held

    def build_hessian_product(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """A function v -> H v at the point `at`; the first derivative is computed once for all products."""
        leaf, gradient = self.compute_gradient(at, graph=True)

        def multiply_hessian(vector: Tensor) -> Tensor:
            if not gradient.requires_grad:
                return torch.zeros_like(vector)
            (product,) = torch.autograd.grad(gradient @ vector, leaf, retain_graph=True)
            return product if self.held is None else product * self.held

        return multiply_hessian


def run_lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Spectrum:
    """The spectrum of a symmetric matrix, given by its products with vectors, after at most `steps` Lanczos steps.

    Every new direction is made orthogonal to all before it; there are fewer steps where nothing new is left. Products
    that are not finite give a spectrum that is not.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        if len(basis) >= min(steps, len(start)):
            break
        stack = torch.stack(basis)
        for _ in range(2):
            image = image - stack.t() @ (stack @ image)
        length = float(image.norm())
        if not length > 1e-6 * max(1e-6, *map(abs, diagonal)):
            break
        beside.append(length)
        basis.append(image / length)
    if not np.isfinite([*diagonal, *beside]).all():
        return Spectrum(np.full(1, np.nan), np.ones(1))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return Spectrum(values, vectors[0] ** 2)


def estimate_spectrum(loss: FlatLoss, at: Tensor, steps: int, generator: torch.Generator) -> Spectrum:
    """The spectrum of H at a point, from one random direction of signs (a Rademacher probe)."""
    start = torch.randint(0, 2, at.shape, generator=generator).to(at) * 2 - 1
    return run_lanczos(loss.build_hessian_product(at), start if loss.held is None else start * loss.held, steps)


def estimate_lipschitz(loss: FlatLoss, at: Tensor, way: Tensor) -> float:
    """L_k, the Lipschitz constant of B(Delta) = H Delta - (grad L(w + Delta) - grad L(w)), estimated along `way`.

    It is the largest of |B(Delta)| / |Delta| at three points of the way, 0 for a quadratic loss. Printed is H minus a
    gradient, a matrix minus a vector; this is the reading whose dimensions agree.
    """
    product, (_, here) = loss.build_hessian_product(at), loss.compute_gradient(at)
    secants = [0.0]
    for share in (0.05, 0.2, 1.0):
        step = share * way
        bend = product(step) - (loss.compute_gradient(at + step)[1] - here)
        secants.append(float(bend.norm() / step.norm().clamp(min=1e-12)))
    return float(np.max(secants))


def compute_shares_above(spectrum: Spectrum) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spaced values t from just below a spectrum to just above it, and the smoothed share of it above each.

    Each t stands for a bin around it, and the bins below it are those that end halfway before it.
    """
    places = np.linspace(spectrum.values[0] - MARGIN, spectrum.values[-1] + MARGIN, BINS)
    half, width = (places[1] - places[0]) / 2, np.sqrt(VARIANCE * max(1.0, places[-1] - places[0]))
    edges = np.append(places - half, places[-1] + half)
    normal = torch.special.ndtr(torch.from_numpy((edges[:, None] - spectrum.values) / width)).numpy()
    below = normal @ spectrum.weights
    return places, np.clip(1 - (below[:-1] - below[0]) / (below[-1] - below[0]), 0, 1)


def find_plateau_rate(spectrum: Spectrum) -> float:
    """The share of the spectrum above the first t >= 0 after which it hardly falls: three changes in a row below 0.005.

    Where the share falls below half of that above 0 before, the steps of 0.1 were too wide: they are halved, as often
    as it takes. Most of a trained model's curvature lies in a narrow peak around 0, and steps must be small beside it.
    """
    places, shares = compute_shares_above(spectrum)

    def read_share_above(place: float) -> float:
        return float(shares[max(0, np.searchsorted(places, place, "right") - 1)])

    step, first = 0.1, read_share_above(0.0)
    while step > 1e-12:
        place, found = 0.0, [first]
        while found[-1] >= first / 2:
            if len(found) > 3 and max(before - after for before, after in pairwise(found[-4:])) < PLATEAU_TOLERANCE:
                return found[-1]
            place += step
            found.append(read_share_above(place))
        step /= 2
    return first


def find_eigengap_rate(spectrum: Spectrum, constant: float) -> float | None:
    """m_k / h_k: the share of the spectrum up to the first gap wider than 4 L_k; None where there is no such gap."""
    wide = np.flatnonzero(np.diff(spectrum.values) > 4 * constant)
    return float(spectrum.weights[: wide[0] + 1].sum()) if len(wide) else None


def estimate_pruning_rate(
    rule: str, loss: FlatLoss, start: Params, end: Params, steps: int, generator: torch.Generator
) -> float | None:
    """The share of a model that can go, at most MAX_PRUNING_RATE; None where the curvature is not finite.

    `eigen_gap` falls back to `slq_plateau` where it finds no gap or a share above the maximum: on trained nets the
    first gap that is wide enough lies among the few largest eigenvalues, so that next to nothing of the model would be
    left.
    """
    at = loss.flatten(end)
    spectrum = estimate_spectrum(loss, at, steps, generator)
    if not np.isfinite(spectrum.values).all():
        return None
    share = (
        find_eigengap_rate(spectrum, estimate_lipschitz(loss, at, loss.flatten(start) - at))
        if rule == "eigen_gap"
        else None
    )
    if share is None or share > MAX_PRUNING_RATE:
        share = find_plateau_rate(spectrum)
    return min(max(share, 0.0), MAX_PRUNING_RATE)


def estimate_held_rate(device: Device, params: Params, batch: Batch, rule: str, steps: int) -> float | None:
    """The same on a device, over what it holds of the model; from the received model to `params`."""
    loss = FlatLoss(device.net, params, batch)
    if device.covered:
        # what the device does not hold never moves, so it must not count in the spectrum
        anchor = device.anchor
        cover = {k: device.covered.get(k, torch.ones_like(anchor[k])) for k in device.net.shared_trainable}
        loss.held = loss.flatten(cover).to(loss.flatten(params))
    return estimate_pruning_rate(rule, loss, device.anchor, params, steps, device.generator("probe"))
