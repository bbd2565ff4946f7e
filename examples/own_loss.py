"""A loss of one's own: the pinball loss, by which a model learns the 90 % quantile in place of the mean.

python examples/own_loss.py
"""

import torch
from torch import Tensor

import shoal


def compute_pinball_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per sample: 0.9 times what is missing, 0.1 times what is too much."""
    missing = targets - outputs.reshape(targets.shape)
    return torch.maximum(0.9 * missing, -0.1 * missing)


def make_numbers(count: int = 800) -> tuple[Tensor, Tensor]:
    """Numbers that depend on five measurements, with noise that grows with the first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 5, generator=generator)
    noise = torch.randn(count, generator=generator) * (0.2 + x[:, 0].abs())
    return x, x.sum(1) + noise


if __name__ == "__main__":
    x, y = make_numbers()
    for name, loss in (("mean", "squared"), ("90 % quantile", compute_pinball_loss)):
        result = shoal.run(data=(x, y), loss=loss, split="iid", devices=8, sample=4, rounds=40, lr=0.01)
        with torch.no_grad():
            below = (y <= result.module()(x)[:, 0]).double().mean()
        print(f"{name:14} mae {result.headline:.3f}, {below:.0%} of the numbers lie below what is predicted")
