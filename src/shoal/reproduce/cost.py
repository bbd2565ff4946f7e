"""What a round of a cell costs on this machine: from runs that are recorded, or from a short trial."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from shoal.compare.comparison import play_all_runs
from shoal.core.errors import ShoalError
from shoal.core.interrupts import STOP_KINDS
from shoal.reproduce.ledger import LedgerRun, describe_machine
from shoal.runs.history import read_history
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder
from shoal.runs.watching import Stop

log = logging.getLogger("shoal")
TRIAL_ROUNDS = 3
"""Rounds of a trial; the first is not counted, since engines compile and caches fill in it."""
TRIAL_SECONDS = 20.0
"""After so many seconds a trial ends with the round that is going on; if that is the first, it is counted."""
SIZE_KEYS = ("data", "model", "devices", "sample", "epochs", "steps", "batch", "augment", "split")
"""Recipe keys in which runs must agree for the seconds of one to say something about the other."""
BASES = {
    "own rounds": "the cell's own rounds so far",
    "same method": "recorded runs of the same method and size",
    "other methods": "recorded runs of other methods of the same size",
    "a trial": f"up to {TRIAL_ROUNDS} rounds of the first missing cell of the setting, just played",
}
"""What the seconds of a round can be from."""


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round of one run, and where they are from."""

    seconds: float
    source: str
    basis: str = "own rounds"
    """The same in two words, one of BASES."""
    machine: str = ""
    """The machine that took them, where it is another."""

    @property
    def is_of_this_machine(self) -> bool:
        return not self.machine


def find_own_cost(recipes: Sequence[Recipe]) -> RoundCost | None:
    """The seconds of a round by what the cell's own runs have played."""
    seconds = [seconds for recipe in recipes for seconds in read_round_seconds(recipe)]
    return RoundCost(median(seconds), "its own rounds so far") if seconds else None


def find_recorded_cost(recipe: Recipe, ledger: Sequence[LedgerRun], here: bool) -> RoundCost | None:
    """The seconds of a round by runs of the ledger of the same size, on this machine or on another.

    Runs of the same method go before those of others.
    """
    machine = describe_machine(recipe.compute)
    alike = [run for run in ledger if has_same_size(run.parsed_recipe, recipe) and (run.machine == machine) == here]
    same = [run for run in alike if run.method == recipe.method]
    found, whose, basis = (same, recipe.method, "same method") if same else (alike, "other methods", "other methods")
    seconds = [row["wall_seconds"] for run in found for row in run.rows[1:]]
    if not seconds:
        return None
    if here:
        return RoundCost(median(seconds), f"runs of {whose} here", basis)
    other = found[0].machine
    return RoundCost(median(seconds), f"runs of {whose} on another machine ({other})", basis, other)


def read_round_seconds(recipe: Recipe) -> list[float]:
    """The seconds of every round but the first that a run's folder has."""
    folder = RunFolder(Path(recipe.out), None)
    if not recipe.out or not folder.history_file.is_file():
        return []
    try:
        return [row["wall_seconds"] for row in read_history(folder.history_file).rows[1:]]
    except ShoalError:
        return []  # whoever resumes the run says what is wrong


def has_same_size(recipe: Recipe, other: Recipe) -> bool:
    return all(getattr(recipe, key) == getattr(other, key) for key in SIZE_KEYS)


def measure_round(recipes: Sequence[Recipe], method: str) -> RoundCost | None:
    """The seconds of a round of one run in a short trial; None where it cannot be played here.

    On a GPU all seeds are tried, since they cost less side by side; on a processor one stands for them.
    """
    tried = recipes[:1] if recipes[0].compute == "cpu" else recipes
    trial = [replace(recipe, rounds=TRIAL_ROUNDS, out="") for recipe in tried]
    end = perf_counter() + TRIAL_SECONDS

    def stop_in_time(*_: Any) -> Stop | None:
        return Stop("the time of a trial is over") if perf_counter() > end else None

    what = f"{method}, {recipes[0].model} on {recipes[0].data}"
    log.info("trial: up to %d rounds of %s, to learn what one takes", TRIAL_ROUNDS, what)
    try:
        comparison = play_all_runs({method: trial}, 0.0, stop_in_time)
    except ShoalError as error:
        if error.kind.name in STOP_KINDS:
            raise
        log.warning("No trial could be played: %s", error.problem)
        return None
    histories = [result.history.rows for result in comparison.results[method]]
    seconds = [row["wall_seconds"] for rows in histories for row in (rows[1:] or rows)]
    played = max(map(len, histories))
    source = f"a trial of {played} {'round' if played == 1 else 'rounds'} of {method}"
    return RoundCost(median(seconds), source, "a trial")
