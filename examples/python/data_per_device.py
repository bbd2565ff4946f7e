"""A list with the samples of each device, and the speed of each device."""

import torch

import shoal


def measure(device):
    x = torch.randn(60, 12) + 0.3 * device  # every device sees the world with an offset of its own
    return x, (x[:, 0] > 0.3 * device).long()


devices = [measure(d) for d in range(6)]
speeds = [4.0, 2.0, 1.0, 1.0, 0.5, 0.25]  # 1.0 is a device of the fleet `uniform`
print(shoal.run("fedavg", data=devices, split="owner", devices=6, sample=3, fleet=speeds, rounds=5))
