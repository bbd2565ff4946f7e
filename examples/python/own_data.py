"""Data of your own as tensors: (x, y), or (x, y, test_x, test_y)."""

import torch

import shoal

x = torch.randn(600, 12)
y = (x[:, 0] * x[:, 1] > 0).long()
print(shoal.run("fedavg", data=(x[:500], y[:500], x[500:], y[500:]), devices=10, rounds=10, lr=0.05))
