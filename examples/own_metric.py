"""A metric of one's own beside those of a task: the share of numbers that are predicted within a tenth of their size.

    python examples/own_metric.py

A function of all outputs and targets will do; `--metrics examples/own_metric.py:close_enough` is the same on the
command line.
"""

import torch
from torch import Tensor

import shoal


def close_enough(outputs: Tensor, targets: Tensor) -> float:
    """The share of numbers whose error is at most a tenth of them."""
    return float(((outputs[:, 0] - targets).abs() <= 0.1 * targets.abs()).double().mean())


def make_houses(count: int = 800) -> tuple[Tensor, Tensor]:
    """Six measurements of a house, and its price in units of 100,000."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return x, 3 + (x @ torch.tensor([0.8, 0.4, 0.2, -0.3, 0.1, 0.0])).tanh()


if __name__ == "__main__":
    result = shoal.run(
        "fedavg",
        data=make_houses(),
        metrics=(f"{__file__}:close_enough",),
        headline="close_enough",
        target=0.9,
        split="iid",
        devices=8,
        sample=4,
        rounds=40,
        lr=0.02,
    )
    cost = result.history.cost_to_target(0.9)
    print(f"mae {result.history.last('mae'):.3f}, within a tenth {result.headline:.0%}", end="")
    print(f", 90 % after {cost['rounds']} rounds" if cost else ", 90 % not reached")
