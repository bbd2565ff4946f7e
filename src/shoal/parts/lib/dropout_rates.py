"""Dropout rates of devices and of units, and the draw of the units that are kept (FedAD, Algorithm 2, lines 6-17)."""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from shoal.core.types import Round


def estimate_device_seconds(round: Round, devices: Sequence[int]) -> np.ndarray:
    """ET_k: the seconds each device would take with the whole model, for the way down, training and the way up.

    A training step costs three forward passes of each sample: one forward, and a backward of twice that.
    """
    size = sum(round.anchor[k].nbytes for k in round.net.names_with_role("shared"))
    work, seconds = round.work, []
    for device in devices:
        samples = work.steps * work.batch if work.steps else work.epochs * round.sizes[device]
        macs = ceil(3 * round.net.macs_forward * samples)
        seconds.append(round.fleet.get_profile(device, round.number).estimate_times(size, macs, size).total)
    return np.array(seconds)


def compute_device_rates(seconds: np.ndarray, mean: float, literal: bool = False) -> np.ndarray:
    """d_k* of each device (line 9) from the ET_k in `seconds` and the `mean` rate d_avg.

    d_k* = max(0, 1 - ET_max / ET_k), ET_max = (1 - d_avg) max_k ET_k: the slowest device drops d_avg, the others what
    brings them to its time, most of them nothing. `literal` is as printed, min(d_avg max_k ET_k / ET_k, 1): the same
    expressions called rates instead of what is kept, with which the fastest devices would drop everything.
    """
    slowest = seconds.max(initial=0.0)
    share = np.divide(slowest, seconds, out=np.ones_like(seconds), where=seconds > 0)
    return np.minimum(share * mean, 1) if literal else np.maximum(0, 1 - share * (1 - mean))


def compute_neuron_rates(scores: Mapping[str, np.ndarray], mean: float, most: float) -> dict[str, np.ndarray]:
    """d_k^i of each unit (line 11): min(most, s exp(-z_i)), s such that the mean over all units is `mean`, d_k*.

    z_i is the score r^i standardised within its axis. Printed is softmax(-r^i) N d_k*, which can exceed 1, and in which
    the layers with the smallest maps would always go first, since a rank is bounded by the size of the map.
    """
    z = {name: standardise_scores(own) for name, own in scores.items()}
    factors = np.exp(-np.concatenate(list(z.values()))) if z else np.zeros(0)
    if mean <= 0 or not len(factors):
        return {name: np.zeros(len(own)) for name, own in z.items()}
    if mean >= most:
        return {name: np.full(len(own), most) for name, own in z.items()}
    # the mean grows with s, so at most 200 halvings find s to the last bit
    low, high = 0.0, most / factors.min()
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if np.minimum(most, middle * factors).mean() < mean else (low, middle)
    ends = np.cumsum([len(own) for own in z.values()])[:-1]
    return dict(zip(z, np.split(np.minimum(most, high * factors), ends)))


def standardise_scores(values: np.ndarray) -> np.ndarray:
    """Scores with mean 0 and deviation 1; all 0 where they are alike, since their differences are rounding errors."""
    spread = values.std()
    return (values - values.mean()) / spread if spread > 1e-9 else np.zeros(len(values))


def draw_kept_neurons(
    rates: np.ndarray, scores: np.ndarray, least: float, generator: np.random.Generator
) -> np.ndarray:
    """The units of an axis that are kept (line 17): unit i with probability 1 - rates[i].

    At least the share `least` of them, and one unit, is kept, or the layer would pass nothing on: the units with the
    highest scores fill up.
    """
    kept = generator.random(len(rates)) >= rates
    missing = max(1, int(np.ceil(least * len(rates)))) - int(kept.sum())
    if missing > 0:
        order = np.argsort(-scores, kind="stable")
        kept[order[~kept[order]][:missing]] = True
    return np.flatnonzero(kept)


# as in the released code of FedDHAD -----------------------------------------------------------------------------------
def compute_rates_by_samples(sizes: np.ndarray, devices: Sequence[int], mean: float, floor: float) -> list[float]:
    """d_k = 1 - n_max (1 - d) / n_k of each device, and `floor` where that is not above 0; n_max is the most samples.

    Time is the number of samples there, and nothing else.
    """
    rates = [1 - float(sizes.max()) * (1 - mean) / max(float(sizes[d]), 1.0) for d in devices]
    return [rate if rate > 0 else floor for rate in rates]


def compute_softmax_rates(scores: Mapping[str, np.ndarray], mean: float) -> dict[str, np.ndarray]:
    """d_k N softmax(-r) over the N units of all axes together: the mean is d_k, and some may be 1 and more."""
    if not scores:
        return {}
    everyone = np.concatenate(list(scores.values())).astype(float)
    factors = np.exp(everyone.min() - everyone)
    rates = mean * len(everyone) * factors / factors.sum()
    return dict(zip(scores, np.split(rates, np.cumsum([len(own) for own in scores.values()])[:-1])))


def scale_kept_units(rates: np.ndarray) -> np.ndarray:
    """1 / (1 - p) of each unit; 1 for one that always drops out and is kept only because its layer would be empty."""
    return np.divide(1.0, 1 - rates, out=np.ones_like(rates), where=rates < 1)
