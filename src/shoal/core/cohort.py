"""The devices of a round: the uniform draw, and the check of what parts select instead."""

from collections.abc import Sequence

import numpy as np

from shoal.core.batch import Samples
from shoal.core.errors import ShoalError
from shoal.core.types import SERVER, Round


def draw_uniform_cohort(round: Round, sizes: np.ndarray) -> list[int]:
    """The cohort unless a part selects another: a uniform draw among eligible devices, in rising order."""
    if not (sizes > 0).any():
        raise ShoalError("no-data", "No device holds any data.", "Use fewer devices or another split.")
    eligible = round.eligible
    generator = round.streams.make_numpy_generator("select", round.number)
    chosen = generator.choice(len(eligible), min(round.sample, len(eligible)), replace=False, shuffle=False)
    return sorted(int(eligible[i]) for i in chosen)


def check_cohort(devices: Sequence[int], sizes: np.ndarray, server: Samples | None) -> list[int]:
    """The selection as a list, if it names each device once and all of them hold data."""
    unknown = [d for d in devices if d != SERVER and not (0 <= d < len(sizes) and sizes[d] > 0)]
    if unknown or len(set(devices)) != len(devices):
        problem = f"The selection {list(devices)[:8]} names a device twice, or one that does not exist or has no data."
        raise ShoalError("bad-part", problem, "A part's `select` must return different devices of `round.eligible`.")
    if SERVER in devices and server is None:
        problem = "The server takes part but has no data."
        raise ShoalError("no-data", problem, "Give it some: --server-data share:0.05.")
    return list(devices)
