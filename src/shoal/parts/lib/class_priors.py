"""How many samples of each class a device has, by which losses for uneven labels shift logits."""

import torch
from torch import Tensor

from shoal.core.types import Device
from shoal.parts.lib.label_counts import count_labels


def count_device_labels(device: Device, missing: float) -> Tensor:
    """How many labels of each class a device has, in double precision; `missing` for a class that it does not have."""
    counts = count_labels(device.samples, device.net.classes).to(device.net.place, torch.float64)
    return torch.where(counts > 0, counts, missing)


def compute_log_prior(device: Device) -> Tensor:
    """log(n_c / n), where a class that the device does not have counts as 1e-12 of a sample."""
    counts = count_device_labels(device, 1e-12)
    return (counts / counts.sum()).log().to(device.net.dtype)
