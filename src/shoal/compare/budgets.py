"""Budgets of simulated seconds and bytes at which methods are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from shoal.core.errors import ShoalError
from shoal.runs.curves import SPENT_COLUMNS
from shoal.runs.session import Result

COST_COLUMNS = {kind: SPENT_COLUMNS[kind] for kind in ("seconds", "bytes")}
"""The columns of a history that count against a budget."""
MOST = 1e30
"""Budgets must be below it."""


@dataclass(frozen=True)
class Budgets:
    """Budgets at which methods are compared; where none of a kind is given, what the cheapest method spent."""

    seconds: tuple[float, ...] = ()
    """Simulated seconds."""
    bytes: tuple[float, ...] = ()
    """Bytes sent, both ways together."""

    def __post_init__(self):
        for kind in COST_COLUMNS:
            given = getattr(self, kind)
            for budget in given:
                if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < MOST:
                    raise ShoalError(
                        "bad-value",
                        f"A budget of {budget!r} {kind} is no cost that a run could keep within or exceed.",
                        f"Give a number of {kind} above 0, such as {'900' if kind == 'seconds' else '5e9'}.",
                    )
            object.__setattr__(self, kind, tuple(sorted({float(b) for b in given})))

    def __bool__(self) -> bool:
        return bool(self.seconds or self.bytes)

    def describe(self, headline: str = "accuracy") -> str:
        """Where the budgets come from, in words; `headline` is the metric that is compared."""
        cheapest = [kind for kind in COST_COLUMNS if not getattr(self, kind)]
        cheapest_text = "within what the cheapest method spent in all"
        if not self:
            return f"The last {headline} {cheapest_text}."
        return (
            f"The last {headline} within the budgets given"
            + "".join(f"; for {kind}, {cheapest_text}" for kind in cheapest)
            + "."
        )


CHEAPEST = Budgets()


def summarise_at_budget(results: Sequence[Result], kind: str, budget: Mapping[int, float]) -> dict[str, Any]:
    """The mean headline of one method within a budget, which is given by seed, and its deviation over seeds."""
    ends = [r.history.accuracy_at_budget(budget[r.recipe.seed], *COST_COLUMNS[kind]) for r in results]
    accuracies = [end for end in ends if end is not None]
    return {
        "cost": kind,
        "budget": mean(budget.values()),
        "accuracy": mean(accuracies) if accuracies else None,
        "spread": stdev(accuracies) if len(accuracies) > 1 else None,
        "seeds": len(accuracies),
    }
