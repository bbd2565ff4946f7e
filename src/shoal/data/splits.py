"""Splits: which device holds which samples."""

from collections.abc import Callable

import numpy as np

from shoal.core.errors import ShoalError, unknown

Split = list[np.ndarray]
"""The sample numbers of each device; a device may have none."""


def iid(labels: np.ndarray, devices: int, generator: np.random.Generator) -> Split:
    """Shuffled and dealt out evenly."""
    return np.array_split(generator.permutation(len(labels)), devices)


def dirichlet(labels: np.ndarray, devices: int, generator: np.random.Generator, beta: float) -> Split:
    """Each class is spread over the devices in proportions drawn from Dirichlet(beta); small beta, uneven devices."""
    held: list[list[np.ndarray]] = [[] for _ in range(devices)]
    for label in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(devices, beta))
        ends = np.floor(np.cumsum(shares)[:-1] * len(rows) + 0.5).astype(int)
        for device, part in enumerate(np.split(rows, ends)):
            held[device].append(part)
    return [np.sort(np.concatenate(parts)) for parts in held]


def _beta(text: str) -> float:
    value = float(text)
    if not 1e-6 <= value <= 1e6:
        raise ValueError
    return value


SPLITS: dict[str, tuple[Callable[..., Split], tuple[Callable[[str], float], ...], str]] = {
    "iid": (iid, (), "iid"),
    "dirichlet": (dirichlet, (_beta,), "dirichlet:BETA with BETA from 1e-6 to 1e6, for example dirichlet:0.5"),
}


def parse_split(text: str) -> Callable[[np.ndarray, int, np.random.Generator], Split]:
    """The split that a text like `dirichlet:0.5` names."""
    name, *given = text.split(":")
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    function, readers, form = SPLITS[name]
    try:
        values = [read(value) for read, value in zip(readers, given, strict=True)]
    except ValueError:
        raise ShoalError("bad-value", f"The split {text[:80]!r} cannot be read.", f"Write {form}.") from None
    return lambda labels, devices, generator: function(labels, devices, generator, *values)


def hold_back(text: str, labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The samples that the server keeps for itself: `share:0.05` takes that share of all, at random."""
    name, _, given = text.partition(":")
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if name != "share" or not 0 < share < 1:
        raise ShoalError(
            "bad-value", f"The server's data {text[:80]!r} cannot be read.", "Write share:P with 0 < P < 1."
        )
    return np.sort(generator.permutation(len(labels))[: max(1, round(share * len(labels)))])
