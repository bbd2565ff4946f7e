"""Splits by name: parses texts such as `dirichlet:0.5` into a rule that spreads samples over devices."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.data.feature_skew import SKEWS, FeatureSkew, parse_skew
from shoal.data.population import Population, split_virtual
from shoal.data.split_rules import (
    split_by_owner,
    split_by_time,
    split_dirichlet,
    split_dirichlet_capped,
    split_domains,
    split_dominant,
    split_iid,
    split_labels,
    split_missing,
    split_pathological,
    split_quantity,
    split_shards,
    split_to_degree,
)


def build_bounded_parser(low: float, high: float, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    """A parser of numbers within these bounds."""

    def parse_bounded(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse_bounded


_beta, _level, _count = (
    build_bounded_parser(1e-6, 1e6),
    build_bounded_parser(0, 10),
    build_bounded_parser(1, 10**9, int),
)

SPLITS: dict[str, tuple[Callable[..., Population], tuple[Callable[[str], float], ...], str]] = {
    "iid": (split_iid, (), "iid"),
    "dirichlet": (
        split_dirichlet,
        (_beta, _count),
        "dirichlet:BETA with BETA from 1e-6 to 1e6, for example dirichlet:0.5, "
        "or dirichlet:BETA:MIN with at least MIN samples on each device",
    ),
    "dirichlet-capped": (
        split_dirichlet_capped,
        (_beta, _count),
        "dirichlet-capped:BETA, for example dirichlet-capped:0.1, "
        "or dirichlet-capped:BETA:MIN with at least MIN samples on each device",
    ),
    "shards": (split_shards, (_count,), "shards:K with K shards for each device, for example shards:2"),
    "dominant": (split_dominant, (_level,), "dominant:E with E from 0 to 10, for example dominant:5"),
    "missing": (split_missing, (build_bounded_parser(0, 9),), "missing:E with E from 0 to 9, for example missing:5"),
    "labels": (split_labels, (_count,), "labels:K with K classes on each device, for example labels:5"),
    "pathological": (
        split_pathological,
        (_count,),
        "pathological:K with K classes on each device, for example pathological:2",
    ),
    "quantity": (
        split_quantity,
        (_beta, _count),
        "quantity:BETA with BETA from 1e-6 to 1e6, for example quantity:0.5, "
        "or quantity:BETA:MIN with at least MIN samples on each device",
    ),
    "owner": (split_by_owner, (), "owner"),
    "domains": (split_domains, (), "domains"),
    "time": (split_by_time, (), "time"),
    "virtual": (split_virtual, (_count,), "virtual:N with N samples on each device, for example virtual:60"),
    "degree": (split_to_degree, (build_bounded_parser(0, 1),), "degree:D with D from 0 to 1, for example degree:0.3"),
}
"""For each name its function, the readers of its values, and how it is written."""


@dataclass(frozen=True)
class Split:
    """A way to spread samples over devices, as a text names it."""

    text: str
    function: Callable[..., Population]
    values: tuple[float, ...]
    skews: tuple[FeatureSkew, ...] = ()
    """How the inputs of devices differ, to be applied to the data set once the samples are spread."""

    def __call__(
        self,
        labels: np.ndarray,
        devices: int,
        generator: np.random.Generator,
        owners: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> Population:
        """The population of so many devices; some rules look at `owners` or at times (`order`) and not at labels."""
        if devices < 1 or len(labels) == 0:
            raise ShoalError(
                "bad-value", f"{len(labels)} samples cannot be split over {devices} devices.", "Give one or more."
            )
        looks_at = {split_by_owner: owners, split_domains: owners, split_by_time: order}
        return self.function(looks_at.get(self.function, labels), devices, generator, *self.values)


def parse_split(text: str) -> Split:
    """The split that a text like `dirichlet:0.5` names, with feature skews after it: `iid+noise:0.5`."""
    rule, *skews = text.split("+")
    name, *given = rule.split(":")
    if name in SKEWS:
        raise ShoalError("bad-value", f"{name} is no split by itself.", f"Write a split before it: iid+{rule[:40]}.")
    if name not in SPLITS:
        raise unknown_name_error("split", name, SPLITS)
    function, readers, form = SPLITS[name]
    try:
        if not len(readers) - len(function.__defaults__ or ()) <= len(given) <= len(readers):
            raise ValueError
        values = tuple(read(value) for read, value in zip(readers, given))
    except ValueError:
        raise ShoalError("bad-value", f"The split {text[:80]!r} cannot be read.", f"Write {form}.") from None
    return Split(text, function, values, tuple(map(parse_skew, skews)))
