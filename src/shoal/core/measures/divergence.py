"""Label heterogeneity: the divergence of a device's label distribution from that of all devices together.

It is the Jensen-Shannon divergence with log2: 0 for the same mix of labels, 1 for no label in common. Among ten
classes that are equally frequent, a device with five of them has 0.3113 and a device with two of them 0.6100.
"""

import numpy as np


def jensen_shannon_divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """JS(p, q) with log2, of probabilities along the last axis: from 0 to 1, never NaN."""
    p, q = np.broadcast_arrays(np.asarray(p, dtype=float), np.asarray(q, dtype=float))
    total = p + q

    def half_divergence(a: np.ndarray) -> np.ndarray:
        ratio = np.divide(2 * a, total, out=np.ones(a.shape), where=a > 0)
        return (a * np.log2(ratio)).sum(-1) / 2

    return np.clip(half_divergence(p) + half_divergence(q), 0.0, 1.0)


def measure_label_degree(counts: np.ndarray, all_counts: np.ndarray) -> float:
    """The divergence of label counts, of a device or not, from the label counts of all devices."""
    shares = [labels / max(labels.sum(), 1.0) for labels in (counts, all_counts)]
    return float(jensen_shannon_divergence(*shares))


def measure_label_degrees(histograms: np.ndarray) -> np.ndarray:
    """The divergence of each device's labels (devices x classes) from all labels pooled; 0 for one without data."""
    counts = np.asarray(histograms, dtype=float)
    sizes = counts.sum(1)
    pooled = counts.sum(0) / max(float(sizes.sum()), 1.0)
    shares = counts / np.maximum(sizes, 1.0)[:, None]
    return np.where(sizes > 0, jensen_shannon_divergence(shares, pooled), 0.0)
