"""Which samples are held back to test or to validate: drawn at random, or the newest where their order is known."""

import numpy as np

from shoal.core.errors import ShoalError


def choose_held_out_rows(
    total: int, share: float, seed: int, order: np.ndarray | None = None, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The sample numbers that stay, and those held back, each in ascending order; with `order` the newest are.

    Where `labels` are given, every class gives the same share of its samples, but for rounding.
    """
    held = round(share * total) if 0 < share < 1 else 0
    if not 0 < held < total:
        raise ShoalError(
            "no-data",
            f"Holding back a share of {share} of {total} samples leaves one half empty.",
            "Write a number between 0 and 1 that leaves at least one sample on either side.",
        )
    if order is None:
        rows = np.random.default_rng(seed).permutation(total)
        if labels is not None:
            rows = spread_evenly(rows[np.argsort(labels[rows], kind="stable")], held)
    else:
        rows = np.argsort(order, kind="stable")
    return np.sort(rows[: total - held]), np.sort(rows[total - held :])


def spread_evenly(order: np.ndarray, held: int, start: int = 0) -> np.ndarray:
    """The same numbers with `held` of them, which lay at equal distances, at the end.

    With a `start` drawn from 0 to len(order) - 1 each of them is held with the same chance; with 0 the last one always.
    """
    steps = (np.arange(len(order) + 1) * held + start) // len(order)
    is_held = steps[1:] > steps[:-1]
    return np.concatenate([order[~is_held], order[is_held]])
