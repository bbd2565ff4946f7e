"""The samples of each device: rows of one data set, which all devices share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.model.inputs import Inputs

MOST_KEPT = 1024
"""Devices whose samples are kept; a device is asked for them several times in a round."""


class DeviceSamples:
    """Gives the samples of a device by its number; what was made is kept for a while, and never pickled."""

    def __init__(self, inputs: Inputs, targets: Tensor, find_rows: Callable[[int], np.ndarray]):
        self.inputs, self.targets, self.find_rows = inputs, targets, find_rows
        self.kept: dict[int, Samples] = {}

    def __call__(self, device: int) -> Samples:
        samples = self.kept.get(device)
        if samples is None:
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            samples = Samples(self.inputs, self.targets, torch.from_numpy(self.find_rows(device)))
            self.kept[device] = samples
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"kept": {}}
