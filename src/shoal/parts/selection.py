"""Selection: which devices take part in a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core.model.tree import Tree
from shoal.core.part import Neutral, Part
from shoal.core.types import Round
from shoal.parts.lib.checks import require


@dataclass(frozen=True)
class Uniform(Part):
    """Every device with data is equally likely to be selected.

    `share` is the share of them that takes part (0: the recipe's number). This is also what happens without any
    selection part, with other random draws.
    """

    cite: ClassVar = ()
    sets: ClassVar = frozenset({"select"})
    neutral: ClassVar = Neutral({"share": 1.0})

    share: float = 0.0

    def __post_init__(self):
        require(self, "0 <= share <= 1", 0 <= self.share <= 1)

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        eligible = round.eligible
        count = max(1, int(self.share * len(eligible) + 0.5)) if self.share else round.sample
        return draw_cohort(eligible, count, None, round), state


@dataclass(frozen=True)
class Weighted(Part):
    """A device's chance of being selected grows with its number of samples.

    It is proportional to that number to the power `power`; 0 makes all alike.
    """

    cite: ClassVar = ()
    reads: ClassVar = frozenset({"sizes"})
    sets: ClassVar = frozenset({"select"})

    power: float = 1.0

    def __post_init__(self):
        require(self, "power of any finite size", abs(self.power) < 100)

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        eligible = round.eligible
        if not len(eligible):
            return [], state
        logs = self.power * np.log(round.sizes[eligible].astype(np.float64))
        chance = np.exp(logs - logs.max())
        return draw_cohort(eligible, round.sample, chance / chance.sum(), round), state


def draw_cohort(eligible: np.ndarray, count: int, chances: np.ndarray | None, round: Round) -> list[int]:
    """Different devices, from the part's own stream."""
    possible = len(eligible) if chances is None else int((chances > 0).sum())
    chosen = round.generator().choice(len(eligible), min(count, possible), replace=False, p=chances)
    return sorted(int(eligible[i]) for i in chosen)
