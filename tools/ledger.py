"""The ledger of results: runs with their recipe, history and commit, in results/NAME.jsonl.gz; a line for each run."""

import gzip
import json
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from statistics import mean, stdev
from typing import Any

from markers import ROOT

from shoal.runs.recipe import Recipe

FOLDER = ROOT / "results"
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""For so many values, half the width of a 95 % confidence interval in standard errors."""

ALWAYS_SHOWN = ("data", "model", "split", "lr")
"""Recipe keys that a command says even where they have their defaults."""

NEVER_SHOWN = ("method", "seed", "engine", "width")
"""Recipe keys that a command says otherwise, or that change only how fast a run is."""


@dataclass(frozen=True)
class LedgerRun:
    """One run: `recipe` is TOML, `rows` its history without the columns devices, bytes_by and seconds_by."""

    method: str
    seed: int
    commit: str
    machine: str
    recipe: str
    rows: list[dict[str, Any]]

    def mean_accuracy(self, until: int, rounds: int = 20) -> float:
        """The mean accuracy of the last `rounds` rounds up to round `until`, counted from 1, in per cent."""
        return 100 * self.mean_of("accuracy", until, rounds)

    def mean_of(self, column: str, until: int, rounds: int = 20) -> float:
        """The mean of a column over those of the last `rounds` rounds up to round `until` that have it."""
        values = (row.get(column) for row in self.rows[max(until - rounds, 0) : until])
        return mean(value for value in values if value is not None)

    def accuracy_in(self, round: int) -> float:
        """The accuracy of a round, counted from 1, in per cent."""
        return 100 * self.rows[round - 1]["accuracy"]

    def total_bytes(self, until: int | None = None) -> int:
        return sum(row["bytes_down"] + row["bytes_up"] for row in self.rows[:until])


@cache
def read_runs(name: str) -> tuple[LedgerRun, ...]:
    """The runs of one file of the ledger, in its order."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return tuple(LedgerRun(**json.loads(line)) for line in lines)


def group_by_method(name: str) -> dict[str, list[LedgerRun]]:
    """The runs of a file by method, in the file's order, each with its seeds in rising order."""
    groups: dict[str, list[LedgerRun]] = {}
    for run in read_runs(name):
        groups.setdefault(run.method, []).append(run)
    return {method: sorted(runs, key=lambda run: run.seed) for method, runs in groups.items()}


def format_interval(values: list[float], sign: str = "") -> str:
    """The mean of the values and half the width of its 95 % confidence interval."""
    return f"{mean(values):{sign}.2f} ± {STUDENT_95[len(values)] * stdev(values) / len(values) ** 0.5:.2f}"


def format_command(name: str, rounds: int | None = None) -> str:
    """The command that makes the runs of a file; `rounds` is what was asked for where runs were broken off."""
    groups = group_by_method(name)
    first = next(iter(groups.values()))
    recipe = tomllib.loads(first[0].recipe) | ({"rounds": rounds} if rounds else {})
    methods = " ".join(f'"{method}"' if "(" in method else method for method in groups)
    words = [f"shoal compare {methods}", f"--seeds {len(first)}"]
    for f in fields(Recipe):
        value = recipe.get(f.name, f.default)
        if f.name in ALWAYS_SHOWN or f.name not in NEVER_SHOWN and value != f.default and value not in ([], ""):
            flag = f"--{f.name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {','.join(value) if isinstance(value, list) else value}")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > 120:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return "```sh\n" + "\n".join(lines) + "\n```\n"
