"""Protocols: under which rules a table is run and read; `fair` for every table, `authors` where theirs are known."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from shoal.core.errors import ShoalError
from shoal.reproduce.reading import Clock, Reading

FAIR, AUTHORS = "fair", "authors"
PROTOCOLS = (FAIR, AUTHORS)
ONE_RECIPE = "One recipe for all methods; nothing is picked by test data."
LEAST_SEEDS = 3
"""Seeds per cell under `fair`, where nothing else is asked for."""
LAST_EVALUATIONS = 5
"""Under `fair`, the last evaluations whose mean is the accuracy."""
MOST_CHOICES = 200

Expressions = str | Mapping[str, str]
"""One method expression, or one for each column by its name."""


@dataclass(frozen=True)
class ClockData:
    """What a file says about the authors' seconds: constants by model and data, and the methods that differ."""

    up: float
    down: float
    devices: int
    models: Mapping[str, Mapping[str, float]]
    """By `MODEL DATA`: training, params, macs."""
    training_factors: Mapping[str, float] = field(default_factory=dict)
    transfer_factors: Mapping[str, float] = field(default_factory=dict)
    varying: tuple[str, ...] = ()
    """Methods whose rounds do not all cost the same, because they drop or prune."""

    def build_clock(self, model: str, data: str, method: str) -> Clock | None:
        """The clock of a cell; None where the authors' seconds of its model are not known."""
        known = self.models.get(f"{model} {data}")
        if known is None:
            return None
        return Clock(
            known["training"],
            int(known["params"]),
            int(known["macs"]),
            self.devices,
            self.up,
            self.down,
            self.training_factors.get(method, 1.0),
            self.transfer_factors.get(method, 1.0),
            method not in self.varying,
        )


@dataclass(frozen=True)
class Protocol:
    """The rules of one side: recipe keys, seeds, expressions, and how figures are read."""

    name: str = FAIR
    set: Mapping[str, Any] = field(default_factory=dict)
    """Recipe keys over [base]; the column's and the row's go before them."""
    seeds: int = LEAST_SEEDS
    reading: Reading = Reading(last=LAST_EVALUATIONS)
    run: Mapping[str, Expressions] = field(default_factory=dict)
    """By method, what runs in place of the row's own expression."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By model, further models with which its columns are run too."""
    clock: ClockData | None = None
    notes: tuple[str, ...] = ()

    def make_reading(self, model: str, data: str, method: str) -> Reading:
        """The reading of one cell, with its clock."""
        return replace(self.reading, clock=self.clock.build_clock(model, data, method)) if self.clock else self.reading

    @property
    def words(self) -> list[str]:
        """What stands beside the figures, in sentences."""
        reading = replace(self.reading, clock=Clock(0, 1, 1, 1, 1, 1)) if self.clock else self.reading
        return [*([ONE_RECIPE] if self.name == FAIR else []), *reading.words, *self.notes]


def expand_choices(expression: str) -> tuple[str, ...]:
    """The expressions of a list: `feddu(decay={0.9|0.99})` are two, one without braces is itself."""
    pieces = re.split(r"\{([^{}]*)\}", expression)
    options = [piece.split("|") if at % 2 else [piece] for at, piece in enumerate(pieces)]
    count = 1
    for option in options:
        count *= len(option)
    if count > MOST_CHOICES:
        problem = f"{expression[:80]} is a list of {count} methods."
        raise ShoalError("bad-recipe", problem, f"Give {MOST_CHOICES} at most.")
    return tuple("".join(words) for words in product(*options))
