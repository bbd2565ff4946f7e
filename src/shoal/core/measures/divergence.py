"""How far the labels of a device are from those of all devices together.

The Jensen-Shannon divergence with log2: 0 for the same mix of labels, 1 for nothing in common. Among ten classes that
are equally frequent, a device with five of them has 0.3113 and a device with two of them 0.6100.
"""

import numpy as np


def jensen_shannon_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Jensen-Shannon divergence with log2 of probabilities along the last axis: from 0 to 1, never NaN."""
    p, q = np.broadcast_arrays(np.asarray(p, dtype=float), np.asarray(q, dtype=float))
    both = p + q

    def half_divergence(a: np.ndarray) -> np.ndarray:
        ratio = np.divide(2 * a, both, out=np.ones(a.shape), where=a > 0)
        return (a * np.log2(ratio)).sum(-1) / 2

    return np.clip(half_divergence(p) + half_divergence(q), 0.0, 1.0)


def measure_label_degree(counts: np.ndarray, everybody: np.ndarray) -> float:
    """The degree of some labels, which need not be a device's, against the labels of all devices."""
    shares = [own / max(own.sum(), 1.0) for own in (counts, everybody)]
    return float(jensen_shannon_divergence(*shares))


def measure_label_degrees(histograms: np.ndarray) -> np.ndarray:
    """The degree of each device against all devices pooled, which weighs them by size; 0 for a device without data."""
    counts = np.asarray(histograms, dtype=float)
    sizes = counts.sum(1)
    pooled = counts.sum(0) / max(float(sizes.sum()), 1.0)
    each = counts / np.maximum(sizes, 1.0)[:, None]
    return np.where(sizes > 0, jensen_shannon_divergence(each, pooled), 0.0)
