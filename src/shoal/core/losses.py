"""The losses of the built-in learning tasks: one number for each sample, from a model's outputs and the targets.

All of them work under `vmap` and in traced steps: nothing branches on the values of tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_TARGET = -100
"""The target of positions that do not count, as in torch."""


def compute_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    focal: float = 0.0,
    class_weights: tuple[float, ...] = (),
    skips_padding: bool = False,
) -> Tensor:
    """The cross-entropy of each sample; the mean over positions where a sample has several (text).

    `focal` is the exponent gamma of (1 - p)^gamma, p the probability of the true class, by which a loss is multiplied
    (Lin et al. 2017, arXiv:1708.02002); `class_weights` multiply the losses of each class. With `skips_padding`
    positions whose target is below 0 do not count.
    """
    by_position = logits.dim() == 3
    scores = logits.transpose(1, 2) if by_position else logits
    labels = targets.clamp(min=0) if skips_padding else targets
    losses = F.cross_entropy(scores, labels, reduction="none", label_smoothing=label_smoothing)
    if focal:
        plain = F.cross_entropy(scores, labels, reduction="none") if label_smoothing else losses
        losses = (-torch.expm1(-plain)).clamp(min=1e-12) ** focal * losses
    if class_weights:
        losses = losses * torch.tensor(class_weights, dtype=losses.dtype, device=losses.device)[labels]
    if skips_padding:
        present = (targets >= 0).to(losses.dtype)
        losses = losses * present
        return losses.sum(1) / present.sum(1).clamp(min=1) if by_position else losses
    return losses.mean(1) if by_position else losses


def compute_log_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target, without any option; 0 where a target is below 0."""
    scores = logits.movedim(-1, 1)
    return F.cross_entropy(scores, targets.clamp(min=0), reduction="none") * (targets >= 0)


def compute_binary_cross_entropy(
    outputs: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    focal: float = 0.0,
    class_weights: tuple[float, ...] = (),
    yes_weights: tuple[float, ...] = (),
) -> Tensor:
    """The cross-entropy of yes and no, 1 and 0; the mean over labels where a sample has several.

    `label_smoothing` brings targets to s / 2 and 1 - s / 2; `focal` is the exponent of (1 - p)^gamma, p the probability
    of the true answer; `class_weights` multiply the losses of no and yes, and `yes_weights`, one for each label, those
    of yes alone.
    """
    logits, answers = outputs.reshape(targets.shape), targets.to(outputs.dtype)
    smooth = answers * (1 - label_smoothing) + label_smoothing / 2 if label_smoothing else answers
    losses = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
    if focal:
        plain = F.binary_cross_entropy_with_logits(logits, answers, reduction="none") if label_smoothing else losses
        losses = (-torch.expm1(-plain)).clamp(min=1e-12) ** focal * losses
    if class_weights:
        losses = losses * torch.where(answers > 0.5, class_weights[1], class_weights[0]).to(losses.dtype)
    if yes_weights:
        weights = torch.tensor(yes_weights, dtype=losses.dtype, device=losses.device)
        losses = losses * torch.where(answers > 0.5, weights, 1.0)
    return average_over_outputs(losses)


def compute_binary_log_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each yes or no, without any option."""
    return F.binary_cross_entropy_with_logits(
        outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction="none"
    )


def compute_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared error; the mean over numbers where a sample has several."""
    return average_over_outputs((outputs.reshape(targets.shape) - targets.to(outputs.dtype)) ** 2)


def compute_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute error; the mean over numbers where a sample has several."""
    return average_over_outputs((outputs.reshape(targets.shape) - targets.to(outputs.dtype)).abs())


def compute_huber_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error up to an error of 1, and the absolute error less a half beyond it."""
    return average_over_outputs(
        F.huber_loss(outputs.reshape(targets.shape), targets.to(outputs.dtype), reduction="none")
    )


def average_over_outputs(losses: Tensor) -> Tensor:
    """One number per sample: the mean over all dimensions but the first."""
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)
