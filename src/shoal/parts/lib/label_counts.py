"""Label counts of devices: counted by themselves, or estimated by the server from their trained models."""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.errors import ShoalError
from shoal.core.extras import Extra
from shoal.core.measures.divergence import measure_label_degrees
from shoal.core.model.inputs import list_shapes
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.types import SERVER, Round
from shoal.parts.lib.loss_gradient import compute_loss_gradient
from shoal.parts.lib.submodel_units import device_state_key

LABEL_COUNTS = Extra("classes", "int", low=0, about="how often it has each label")
"""What a device tells about its labels at enrolment."""
ASK_ALL_LIMIT = 1000
"""Populations up to this size are asked for their labels before the first round, larger ones device by device."""


def count_labels(samples: Samples, classes: int) -> Tensor:
    """How often each label occurs; of text, at every position."""
    targets = samples.targets[samples.index.to(samples.targets.device)].flatten().cpu()
    return torch.bincount(targets[targets >= 0], minlength=classes).int()


def collect_label_counts(known: Mapping[str, Tensor], round: Round) -> dict[str, Tensor]:
    """The label counts of all devices known so far and of those of this round, which each sends at first contact."""
    if not round.replies:
        everybody = round.population <= ASK_ALL_LIMIT
        new = [int(d) for d in (round.sizes > 0).nonzero()[0]] if everybody else []
    else:
        new = [r.device for r in round.replies if device_state_key(r.device) not in known and r.device != SERVER]
    cards = round.roster.fetch_cards(new) if new else {}
    return {**known, **{device_state_key(d): check_label_counts(d, card["labels"], round) for d, card in cards.items()}}


def check_label_counts(device: int, labels: Tensor, round: Round) -> Tensor:
    """The label counts that a device sent, refused where they are none, and scaled down to the samples that it has."""
    net, counts = round.net, labels.double()
    if counts.shape != (net.classes,) or bool((counts < 0).any()):
        problem = f"Device {device} told something else than how often each of {net.classes} labels occurs."
        raise ShoalError("damaged", problem, "It was not used.")
    most = int(round.sizes[device]) * (max(map(prod, list_shapes(net.input_shape))) if net.token_inputs else 1)
    return counts * (most / counts.sum()) if counts.sum() > most else counts


def estimate_label_shares(net: Net, params: Params, samples: Samples, beta: float, literal: bool = False) -> Tensor:
    """The share theta(i) of each class i in a device's samples, from the gradients of its model on each class.

    theta = softmax(beta u), u_i = (1 / h_i) / mean_j (1 / h_j), h_i = |grad L_i|^2: a model has a small gradient on
    classes that it was trained on. Formula (8) of FedDHAD as printed, softmax(h), says the opposite; it is kept under
    `literal`. A class without samples counts as infinitely steep. Where a gradient is not finite all shares are equal.
    """
    targets = samples.targets[samples.index.to(samples.targets.device)].cpu()
    steep = torch.full((net.classes,), torch.inf, dtype=torch.float64)
    even = torch.full_like(steep, 1 / net.classes)
    for label in range(net.classes):
        rows = samples.index[(targets == label).reshape(len(targets), -1).any(1)]
        if len(rows):
            gradient = compute_loss_gradient(net, params, Samples(samples.inputs, samples.targets, rows))
            steep[label] = torch.stack([g.double().square().sum() for g in gradient.values()]).sum().cpu()
            if not steep[label].isfinite():
                return even
    flat = 1 / (steep + 1e-12)
    shares = torch.softmax(steep if literal else beta * flat / flat.mean(), 0)
    return shares if bool(shares.isfinite().all()) else even


def compute_known_degrees(known: Mapping[str, Tensor], devices: Sequence[int]) -> tuple[list[float], float]:
    """The non-IID degrees of these devices, and the floor under D_k: 2 % of the mean degree, and 0.001 at least.

    A device whose labels are not known has the mean degree.
    """
    counts = np.stack([own.cpu().numpy() for own in known.values()]) if known else np.zeros((0, 1))
    degrees = measure_label_degrees(counts)
    mean = float(degrees.mean()) if len(degrees) else 0.0
    by_device = dict(zip(known, degrees.tolist()))
    return [by_device.get(device_state_key(device), mean) for device in devices], max(1e-3, 0.02 * mean)
