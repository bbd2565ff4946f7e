"""The ledger of results: a folder of files NAME.jsonl.gz, a line for each run with its recipe, commit and history."""

import gzip
import io
import json
import os
import platform
import subprocess
import tomllib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.metric import METRICS
from shoal.core.version import VERSION
from shoal.plugins.load import load_method
from shoal.runs.history import History
from shoal.runs.recipe import Recipe
from shoal.storage.files import damaged_file_error, write_bytes

LEDGER_SUFFIX = ".jsonl.gz"
LEFT_OUT = ("devices", "bytes_by", "seconds_by")
"""Columns of a history that the ledger does without, to stay small."""
HOW_COMPUTED = {"engine": "auto", "width": 0, "threads": 0, "compute": "cpu", "deterministic": False}
"""Recipe keys that say how a run is computed and not what."""
HOW_JUDGED: dict[str, Any] = {"eval_every": 1, "metrics": (), "headline": "accuracy"}
"""Recipe keys that say when and by what a run is judged; they leave its training as it is."""


@dataclass(frozen=True)
class LedgerRun:
    """One run: `recipe` is TOML, `rows` its history without the columns of LEFT_OUT."""

    method: str
    seed: int
    commit: str
    machine: str
    recipe: str
    rows: list[dict[str, Any]]
    protocol: str = ""
    """Under which rules it was run: `fair`, `authors`, or "" for runs from before these."""

    @cached_property
    def parsed_recipe(self) -> Recipe:
        return Recipe().with_values(**tomllib.loads(self.recipe))

    @cached_property
    def history(self) -> History:
        return History(self.rows)

    @cached_property
    def key(self) -> str:
        return make_run_key(self.parsed_recipe)

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

    def cut(self, rounds: int | None) -> "LedgerRun":
        """The run until a round; None for all of it."""
        return self if rounds is None or rounds >= len(self.rows) else replace(self, rows=self.rows[:rounds])

    def keep_metrics(self, asked: Sequence[str]) -> "LedgerRun":
        """The run with those of the metrics it was asked for that are named here, as if the others had not been."""
        unasked = {name for name, metric in METRICS.items() if metric.asked and metric.asked not in asked}
        if not any(name in row for row in self.rows for name in unasked):
            return self
        return replace(self, rows=[{k: v for k, v in row.items() if k not in unasked} for row in self.rows])

    def says_more(self, other: "LedgerRun") -> bool:
        """Whether this is longer than another record of the run, or as long and with more metrics."""
        own, others = set(self.parsed_recipe.metrics), set(other.parsed_recipe.metrics)
        return (len(self.rows), own > others) > (len(other.rows), others > own)

    def is_of(self, recipe: Recipe) -> bool:
        """Whether this is a run of the recipe with the metrics that it asks for, whole or broken off."""
        return self.key == make_run_key(recipe) and set(recipe.metrics) <= set(self.parsed_recipe.metrics)

    def covers(self, recipe: Recipe) -> bool:
        """Whether this is a run of the recipe, at least as long and with the metrics that it asks for."""
        return self.is_of(recipe) and len(self.rows) >= recipe.rounds


def make_run_key(recipe: Recipe) -> str:
    """The same for recipes that compute the same, however they do it and whenever they are judged."""
    expression = "+".join(map(str, load_method(recipe.method, recipe.parts).parts))
    same: Mapping[str, Any] = {**HOW_COMPUTED, **HOW_JUDGED, "method": expression}
    return recipe.with_values(**same).fingerprint()


def find_ledger_folder(results: str) -> Path | None:
    """The folder that was asked for, or `results` in the working folder where that is a ledger."""
    if results:
        if not Path(results).is_dir():
            raise ShoalError("no-data", f"There is no folder {results}.", "Make it, or give the folder of a ledger.")
        return Path(results)
    return Path("results") if list_ledger_files(Path("results")) else None


def list_ledger_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{LEDGER_SUFFIX}"))


def read_ledger_file(file: Path) -> tuple[LedgerRun, ...]:
    """The runs of one file, in its order."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return tuple(LedgerRun(**json.loads(line)) for line in lines)
    except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
        raise damaged_file_error(file, str(error)[:120]) from error


def read_ledger(folder: Path | None) -> tuple[LedgerRun, ...]:
    """The runs of all files of a ledger; none without a folder."""
    return tuple(run for file in list_ledger_files(folder) for run in read_ledger_file(file)) if folder else ()


def write_ledger_file(file: Path, runs: Sequence[LedgerRun]) -> None:
    """Write a file anew; the same runs give the same bytes."""
    page = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=page, mtime=0) as lines:
        for run in runs:
            lines.write(json.dumps(asdict(run), separators=(",", ":"), allow_nan=False).encode() + b"\n")
    write_bytes(file, page.getvalue())


def record_runs(file: Path, runs: Iterable[LedgerRun]) -> int:
    """Add the runs that a file lacks, or has shorter or with fewer metrics; how many those were."""
    known = {(run.key, run.protocol): run for run in (read_ledger_file(file) if file.exists() else ())}
    new: dict[tuple[str, str], LedgerRun] = {}
    for run in runs:
        key = run.key, run.protocol
        other = new.get(key, known.get(key))
        if other is None or run.says_more(other):
            new[key] = run
    if new:
        write_ledger_file(file, list((known | new).values()))
    return len(new)


def make_ledger_run(recipe: Recipe, rows: Sequence[Row], protocol: str = "") -> LedgerRun:
    """A run as the ledger keeps it: without paths, and with the source and the machine that it ran on."""
    kept = [{key: value for key, value in row.items() if key not in LEFT_OUT} for row in rows]
    plain = replace(recipe, out="", data_dir="", address="", rounds=len(kept))
    machine = describe_machine(recipe.compute)
    return LedgerRun(recipe.method, recipe.seed, find_commit(), machine, plain.to_toml(), kept, protocol)


def describe_machine(compute: str) -> str:
    """The GPU, or the processor and its cores, and the version of torch."""
    version = ".".join(torch.__version__.split(".")[:2])
    if compute.startswith("cuda") and torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(torch.device(compute))}, torch {version}"
    return f"{os.cpu_count()} cores of {platform.machine()}, torch {version}"


def find_commit() -> str:
    """The commit of the source that runs, with a remark where it was changed; the version where it is no checkout."""
    folder = Path(__file__).parents[1]

    def ask_git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit, changed = ask_git("rev-parse", "HEAD"), ask_git("status", "--porcelain", "--", ".")
        tracked = ask_git("ls-files", "__init__.py")
    except (OSError, subprocess.CalledProcessError):
        commit, changed, tracked = "", "", ""
    if not (commit and tracked):
        return f"shoal {VERSION}"
    return f"{commit} with changes" if changed else commit
