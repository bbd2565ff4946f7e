"""Server data: samples that the server keeps for itself and no device sees."""

from collections.abc import Callable

import numpy as np

from shoal.core.errors import ShoalError
from shoal.data.noniid_degree import group_by_class


def draw_share(
    labels: np.ndarray, generator: np.random.Generator, part: float, classes: int = 0, aside: float = 0.0
) -> np.ndarray:
    """A share of all samples: at random, or in equal amounts from some classes, themselves drawn at random.

    They are among the share `aside` of all samples, which no device gets, where that is given.
    """
    count = max(1, round(part * len(labels)))
    if aside:
        among = draw_aside_samples(labels, generator, aside)
        if count > len(among):
            problem = f"{count} samples cannot be taken from the {len(among)} that are set aside."
            raise ShoalError("bad-value", problem, "Give a smaller share, or set more aside.")
        return among[draw_share(labels[among], generator, count / len(among), classes)]
    if not classes:
        return generator.permutation(len(labels))[:count]
    rows = group_by_class(labels)
    amounts = count // classes + (np.arange(classes) < count % classes)
    able = [r for r in rows if len(r) >= amounts[0]]
    if len(able) < classes or amounts[-1] == 0:
        raise ShoalError(
            "bad-value",
            f"{count} samples cannot be taken in equal amounts from {classes} of {len(rows)} classes; "
            f"{len(able)} have {amounts[0]} samples.",
            "Give another share or another number of classes.",
        )
    chosen = generator.permutation(len(able))[:classes]
    return np.concatenate([generator.permutation(able[c])[:a] for c, a in zip(chosen, amounts)])


def draw_aside_samples(labels: np.ndarray, generator: np.random.Generator, part: float) -> np.ndarray:
    """A share of all samples, drawn at random."""
    return np.sort(generator.permutation(len(labels))[: max(1, round(part * len(labels)))])


def draw_per_class(labels: np.ndarray, generator: np.random.Generator, count: int) -> np.ndarray:
    """The same number of samples of each class."""
    rows = group_by_class(labels)
    fewest = min(map(len, rows), default=0)
    if fewest < count:
        raise ShoalError(
            "bad-value",
            f"per-class:{count} wants {count} samples of each class, and one class has {fewest}.",
            "Give a smaller number.",
        )
    return np.concatenate([generator.permutation(r)[:count] for r in rows])


def _parse_share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise ValueError
    return value


def _parse_count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 10**9:
        raise ValueError
    return value


def _parse_class_count(text: str) -> int:
    return 0 if text == "all" else _parse_count(text)


SERVER_DATA: dict[str, tuple[Callable[..., np.ndarray], tuple[Callable[[str], float], ...]]] = {
    "share": (draw_share, (_parse_share, _parse_class_count, _parse_share)),
    "per-class": (draw_per_class, (_parse_count,)),
}


def draw_server_samples(text: str, labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The samples that the server keeps for itself, for a text like `share:0.05`, `share:0.05:5` or `per-class:20`."""
    function, values = parse_server_data(text)
    return np.sort(function(labels, generator, *values))


def draw_withheld_samples(text: str, labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The samples that no device gets: the server's, and with `share:P:C:A` all those that it chooses from."""
    function, values = parse_server_data(text)
    if function is draw_share and len(values) == 3:
        return draw_aside_samples(labels, generator, values[2])
    return draw_server_samples(text, labels, generator)


def parse_server_data(text: str) -> tuple[Callable[..., np.ndarray], list[float]]:
    """The function and its numbers for a text like `share:0.05` or `per-class:20`."""
    name, *given = text.split(":")
    try:
        function, readers = SERVER_DATA[name]
        if not 1 <= len(given) <= len(readers):
            raise ValueError
        return function, [read(value) for read, value in zip(readers, given)]
    except (KeyError, ValueError):
        raise ShoalError(
            "bad-value",
            f"The server's data {text[:80]!r} cannot be read.",
            "Write share:P with 0 < P < 1, share:P:C for C of the classes (or all), share:P:C:A where devices lack the "
            "share A, or per-class:M with M samples of each.",
        ) from None
