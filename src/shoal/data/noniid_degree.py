"""Non-IID degrees of splits (Jensen-Shannon divergence of labels), and splits of a given degree."""

from collections.abc import Callable

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.measures.divergence import measure_label_degrees
from shoal.data.population import Population, StoredPopulation

TOLERANCE = 0.01
"""How near `degree:D` comes to D."""


def count_labels_by_device(
    labels: np.ndarray, population: Population, classes: int, devices: int | None = None
) -> np.ndarray:
    """How often each class occurs on each of the first `devices` devices (all when left out): devices x classes.

    Where a sample has a label per position, every position counts; labels below 0 do not.
    """
    count = len(population) if devices is None else min(devices, len(population))
    if isinstance(population, StoredPopulation):
        sizes = population.sizes[:count]
        rows = population.order[: int(sizes.sum())]
    else:
        held = [population[device] for device in range(count)]
        sizes = np.array([len(h) for h in held], dtype=np.int64)
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *held])
    values = labels[rows].reshape(len(rows), -1).astype(np.int64)
    cells = np.repeat(np.arange(count) * classes, sizes)[:, None] + values
    return np.bincount(cells[values >= 0], minlength=count * classes).reshape(count, classes)


def compute_mean_degree(histograms: np.ndarray) -> float:
    """The plain mean over the devices that have data; 0 when none has."""
    held = np.asarray(histograms).sum(1) > 0
    return float(measure_label_degrees(histograms)[held].mean()) if held.any() else 0.0


def group_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """The sample numbers of each class that occurs, in the order of the labels."""
    if labels.ndim != 1:
        raise ShoalError(
            "bad-value",
            "Samples with several labels each, such as text, cannot be told apart by label.",
            "Use the split iid, quantity:BETA, owner, domains, time or virtual:N, and server data share:P.",
        )
    if labels.dtype.kind == "f":
        raise ShoalError(
            "bad-value",
            "The targets are numbers to predict, and samples cannot be told apart by class.",
            "Use the split iid, quantity:BETA, owner, domains, time or virtual:N, and server data share:P.",
        )
    _, counts = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])


def search_degree(
    target: float, draw: Callable[[float, np.random.Generator], np.ndarray], generator: np.random.Generator
) -> np.ndarray:
    """Histograms (devices x classes) of the target degree: `draw(beta, generator)` with a beta found by bisection."""
    seen = []
    for _ in range(10):
        seed, low, high = int(generator.integers(2**63)), -6.0, 6.0
        for _ in range(20):
            middle = (low + high) / 2
            histograms = draw(10.0**middle, np.random.default_rng(seed))
            seen.append(compute_mean_degree(histograms))
            if abs(seen[-1] - target) <= TOLERANCE:
                return histograms
            low, high = (middle, high) if seen[-1] > target else (low, middle)
    (devices, classes), total = histograms.shape, int(histograms.sum())
    raise ShoalError(
        "bad-value",
        f"No Dirichlet split of {total} samples of {classes} classes over {devices} devices was found with "
        f"a mean degree of {target:g}; the nearest has {min(seen, key=lambda value: abs(value - target)):.3f}.",
        "Give a degree within reach, or another number of devices.",
    )


def summarise_population(
    labels: np.ndarray, population: Population, server: np.ndarray, classes: int, most: int = 200
) -> dict:
    """What a split looks like, ready for JSON: sizes, labels and degrees of the first `most` devices.

    `degree` is that of the whole population where it is stored and not too large, else of these devices. `server`
    are the labels of the server's samples. For text both lists of labels are empty: a vocabulary is too long.
    """
    stored = isinstance(population, StoredPopulation) and len(population) * classes <= 2 * 10**6
    counts = count_labels_by_device(labels, population, classes, None if stored else most)
    return {
        "sizes": population.sizes[:most].tolist(),
        "labels": counts[:most].tolist() if labels.ndim == 1 else [],
        "degrees": measure_label_degrees(counts)[:most].tolist(),
        "degree": compute_mean_degree(counts),
        "server": np.bincount(labels[server], minlength=classes).tolist() if labels.ndim == 1 else [],
    }
