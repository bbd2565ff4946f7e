"""Survival times as a task of one's own: Cox's partial likelihood as loss, the C-index as headline.

    python examples/survival.py

A target has two numbers: the time, and 1 where the event was seen at it or 0 where observation ended before (censored).
"""

import torch
from torch import Tensor

import shoal


def compute_cox_loss(risk: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Minus the log partial likelihood of each event among the samples of its batch that were still observed.

    A sample's loss depends on the rest of its batch, so the task says `mixes_batch`, and `weight`, which is 0 for what
    only pads a batch, keeps padding out of the sets at risk.
    """
    score, time, event = risk[:, 0], targets[:, 0], targets[:, 1]
    at_risk = (time[None, :] >= time[:, None]) & (weight > 0)
    lowest = torch.finfo(score.dtype).min
    return event * (torch.where(at_risk, score[None, :], lowest).logsumexp(1) - score)


def compute_c_index(risk: Tensor, targets: Tensor) -> float:
    """The share of comparable pairs in which the one with the earlier event has the higher risk; ties count half."""
    score, time, event = risk[:, 0], targets[:, 0], targets[:, 1]
    comparable = (time[:, None] < time[None, :]) & (event[:, None] > 0)
    difference = (score[:, None] - score[None, :])[comparable]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


survival = shoal.LearningTask(
    "survival",
    compute_cox_loss,
    metrics=(shoal.Metric("c_index", "C-index", "share", "up", drawn=True, compared=True, make=compute_c_index),),
    headline="c_index",
    outputs=1,
    mixes_batch=True,
)


def make_patients(count: int = 600) -> tuple[Tensor, Tensor]:
    """Eight measurements each, times drawn from an exponential whose rate they decide, a third of them censored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator)
    rate = (x @ torch.randn(8, generator=generator)).exp()
    time = -torch.rand(count, generator=generator).clamp(min=1e-6).log() / rate
    censored = torch.rand(count, generator=generator) < 1 / 3
    time = torch.where(censored, time * torch.rand(count, generator=generator), time)
    return x, torch.stack((time, (~censored).float()), 1)


if __name__ == "__main__":
    results = shoal.compare(
        ["fedavg", "fedprox", "scaffold"],
        data=make_patients(),
        task=survival,
        split="iid",
        devices=10,
        sample=5,
        rounds=20,
        batch=32,
        lr=0.05,
        target=0.8,
    )
    for row in results.table():
        print(
            f"{row['method']:10} {results.headline} {row['accuracy']:.3f}, {row['reached']} of {row['seeds']} reached"
        )
