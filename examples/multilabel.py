"""Samples with any number of labels each: the task is found from rows of yes and no, and judged by F1 here.

    python examples/multilabel.py

F1 and average precision come from torchmetrics: pip install 'shoal[metrics]'.
"""

import torch
from torch import Tensor

import shoal


def make_songs(count: int = 900) -> tuple[Tensor, Tensor]:
    """Twelve measurements each, and four labels that each depend on some of them: a song may be loud and old."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 12, generator=generator)
    return x, x @ torch.randn(12, 4, generator=generator) > 1


if __name__ == "__main__":
    results = shoal.compare(
        ["fedavg", "fedavgm", "scaffold"],
        data=make_songs(),
        split="quantity:0.5",
        metrics=("f1_macro", "average_precision"),
        headline="f1_macro",
        devices=12,
        sample=6,
        rounds=20,
        lr=0.2,
    )
    for row in results.table():
        precision = row["average_precision"]
        print(f"{row['method']:10} {results.headline} {row['accuracy']:.3f}, average precision {precision:.3f}")
