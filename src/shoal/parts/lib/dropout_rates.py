"""Dropout rates: how much each device drops, and which units."""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from shoal.core.types import Round


def estimate_device_seconds(round: Round, devices: Sequence[int]) -> np.ndarray:
    """How long each device would take with the whole model: both ways, and three passes for each sample it looks at."""
    size = sum(round.anchor[k].nbytes for k in round.net.names_with_role("shared"))
    work, found = round.work, []
    for device in devices:
        looks = work.steps * work.batch if work.steps else work.epochs * round.sizes[device]
        macs = ceil(3 * round.net.macs_forward * looks)
        found.append(round.fleet.get_profile(device, round.number).estimate_times(size, macs, size).total)
    return np.array(found)


def compute_device_rates(seconds: np.ndarray, mean: float, literal: bool = False) -> np.ndarray:
    """The slowest device drops the mean rate, the others what brings them to its time, most of them nothing.

    Printed are the same expressions as rates and not as what is kept: the fastest devices would drop all.
    """
    slowest = seconds.max(initial=0.0)
    share = np.divide(slowest, seconds, out=np.ones_like(seconds), where=seconds > 0)
    return np.minimum(share * mean, 1) if literal else np.maximum(0, 1 - share * (1 - mean))


def compute_neuron_rates(scores: Mapping[str, np.ndarray], mean: float, most: float) -> dict[str, np.ndarray]:
    """Units that matter less drop out more: min(most, s exp(-z)), s such that the mean over all units is `mean`.

    z is the score, standardised within its axis.
    """
    z = {name: standardise_scores(own) for name, own in scores.items()}
    factors = np.exp(-np.concatenate(list(z.values()))) if z else np.zeros(0)
    if mean <= 0 or not len(factors):
        return {name: np.zeros(len(own)) for name, own in z.items()}
    if mean >= most:
        return {name: np.full(len(own), most) for name, own in z.items()}
    low, high = 0.0, most / factors.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(most, middle * factors).mean() < mean else (low, middle)
    ends = np.cumsum([len(own) for own in z.values()])[:-1]
    return dict(zip(z, np.split(np.minimum(most, high * factors), ends)))


def standardise_scores(values: np.ndarray) -> np.ndarray:
    spread = values.std()
    return (values - values.mean()) / spread if spread > 1e-9 else np.zeros(len(values))


def draw_kept_neurons(
    rates: np.ndarray, scores: np.ndarray, least: float, generator: np.random.Generator
) -> np.ndarray:
    """The units that are kept: each with its own chance, and of every axis at least a share, those that matter most."""
    kept = generator.random(len(rates)) >= rates
    missing = max(1, int(np.ceil(least * len(rates)))) - int(kept.sum())
    if missing > 0:
        order = np.argsort(-scores, kind="stable")
        kept[order[~kept[order]][:missing]] = True
    return np.flatnonzero(kept)
