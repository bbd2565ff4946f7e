"""shoal, through the calls that its users make.

    python benchmarks/peers/ours.py JOB ROUNDS [--engine auto] [--compute cpu] [--threads 0]
                                    [--eval-every 10 | --seeds 3 [--workers 2]]

Seconds are the rows' `wall_seconds`. With `--eval-every` a test half of 10,000 samples is judged, and what share of the
time that takes is told; with `--seeds` several runs are played by `shoal.compare`, and the seconds are those of a round
of all of them together. With `--workers` as well they are divided among processes, which read the data from files in
the form of MNIST's: bytes of noise, for the small job alone.
"""

import logging
import struct
from argparse import Namespace
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from jobs import CLASSES, FOLDER, JOBS, MAIN_JOBS, TESTS, Job, asked, load, load_tests, report
from networks import network
from turn import wait_for_turn

import shoal

LENGTH = 500
"""Rounds of the recipe: `auto` decides for a run of this ordinary length. It is stopped when enough is seen."""


class Watch:
    """Keeps the row of every round and the time at which it came; stops a run that has played enough."""

    def __init__(self, rounds: int, runs: int = 1) -> None:
        self.rounds, self.runs = rounds, runs
        self.played: Counter[shoal.Recipe] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.times: list[float] = []

    def __call__(self, recipe: shoal.Recipe, row: dict[str, Any], history: shoal.History) -> shoal.Stop | None:
        self.played[recipe] += 1
        if self.played[recipe] <= self.rounds:
            self.rows.append(row)
            self.times.append(perf_counter())
        if sum(self.played.values()) == self.runs:
            wait_for_turn()  # after the first round of all runs
        return shoal.Stop("as many rounds as were to be timed") if self.played[recipe] >= self.rounds else None

    @property
    def seconds(self) -> list[float]:
        return [row["wall_seconds"] for row in self.rows]

    def of_all(self) -> list[float]:
        """The time of each round of all runs together: until the last of them has ended it."""
        ends = {row["round"]: time for row, time in zip(self.rows, self.times)}
        return [later - sooner for sooner, later in zip(ends.values(), list(ends.values())[1:])]

    def between(self) -> float:
        """The median time from one row to the next, in which everything is contained."""
        return median(later - sooner for sooner, later in zip(self.times, self.times[1:]))

    def evaluation(self) -> float:
        """The share of the time that evaluations took: what they make a round longer than the median of the others."""
        judged = [row.get("accuracy") is not None for row in self.rows]
        timed = list(zip(self.seconds, judged))[1:]
        usual = median(seconds for seconds, evaluated in timed if not evaluated)
        more = sum(seconds - usual for seconds, evaluated in timed if evaluated)
        return more / sum(self.seconds[1:])


class Said(logging.Handler):
    """What shoal says about its engine."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.engine: str | None = None
        log = logging.getLogger("shoal")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("engine: "):
            self.engine = text.removeprefix("engine: ")


def data_of(job: Job, tests: int | None) -> tuple[torch.Tensor, ...]:
    """Training and test half; the latter cut to a number of samples."""
    x, y = map(torch.from_numpy, load(job))
    test_x, test_y = (torch.from_numpy(array)[0, :tests] for array in load_tests(job))
    return x.flatten(0, 1), y.flatten(), test_x, test_y


def in_files(job: Job) -> dict[str, str]:
    """As many samples in files, where other processes find them."""
    assert job.shape == (784,), "only the small job has the form of MNIST"
    folder = FOLDER / "data" / "files"
    place = folder / "MNIST" / "raw"
    place.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for name, size in (("train", job.devices * job.samples), ("t10k", TESTS)):
        pictures = generator.integers(0, 256, (size, *job.shape), np.uint8)
        labels = generator.integers(0, CLASSES, size, np.uint8)
        write(place / f"{name}-images-idx3-ubyte", struct.pack(">4i", 2051, size, 28, 28), pictures)
        write(place / f"{name}-labels-idx1-ubyte", struct.pack(">2i", 2049, size), labels)
    return {"data": "mnist", "data_dir": str(folder)}


def write(path: Path, head: bytes, numbers: np.ndarray) -> None:
    path.write_bytes(head + numbers.tobytes())


def recipe_of(job: Job, given: Namespace) -> dict[str, Any]:
    given_data = in_files(job) if given.workers > 1 else {"data": data_of(job, None if given.eval_every else 10)}
    return given_data | {
        "model": job.model if job in map(JOBS.get, MAIN_JOBS) else network(job.model),
        "split": "iid",
        "devices": job.devices,
        "sample": job.per_round,
        "epochs": job.epochs,
        "batch": job.batch,
        "lr": job.lr,
        "rounds": LENGTH,
        "eval_every": given.eval_every or 10**9,
        "engine": given.engine,
        "compute": given.compute,
        "threads": given.threads,
    }


def one_run(job: Job, given: Namespace) -> tuple[list[float], dict[str, Any]]:
    every, said = given.eval_every, Said()
    watch = Watch(-(-(given.rounds + 1) // every) * every if every else given.rounds + 1)
    began = perf_counter()
    shoal.run("fedavg", watch=watch, **recipe_of(job, given))
    more = {"between": watch.between(), "total": perf_counter() - began, "engine": said.engine}
    return watch.seconds, more | ({"evaluation": watch.evaluation()} if every else {})


def many_runs(job: Job, given: Namespace) -> tuple[list[float], dict[str, Any]]:
    """Several seeds by `shoal.compare`; the first two rounds, in which things are set up, do not count."""
    watch, said = Watch(given.rounds + 2, given.seeds), Said()
    shoal.compare(["fedavg"], seeds=given.seeds, watch=watch, workers=given.workers, **recipe_of(job, given))
    return watch.of_all(), {"runs": given.seeds, "engine": said.engine}


def main() -> None:
    options = {"threads": (int, 0), "eval_every": (int, 0), "seeds": (int, 0), "workers": (int, 1)}
    given = asked(engine=(str, "auto"), compute=(str, "cpu"), **options)
    seconds, more = (many_runs if given.seeds else one_run)(JOBS[given.job], given)
    if given.compute != "cpu":
        more["gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
    report(seconds, version=f"shoal {shoal.__version__}, torch {torch.__version__}", **more)


if __name__ == "__main__":
    main()
