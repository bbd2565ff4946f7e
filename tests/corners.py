"""A small problem for whole runs of methods that work on features."""

import torch
from torch import Tensor

from shoal.data.user_data import build_user_dataset


def corners(devices: int = 6) -> dict:
    """Three classes around three corners, a device of one class and one of a single sample among them."""
    generator = torch.Generator().manual_seed(0)

    def some(labels: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(3, 6)[labels] * 3 + torch.randn(len(labels), 6, generator=generator), labels

    labels = [*(torch.arange(9 + 3 * d) % 3 for d in range(devices - 2)), torch.full((7,), 2), torch.tensor([1])]
    own = build_user_dataset([some(y) for y in labels], test=some(torch.arange(60) % 3))
    return {"data": own, "split": "owner", "devices": devices, "sample": devices, "batch": 4, "lr": 0.1, "model": "mlp"}
