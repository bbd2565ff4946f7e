"""shoal, through the calls that its users make.

    python benchmarks/peers/ours.py JOB ROUNDS [--engine auto] [--compute cpu] [--threads 0]
                                    [--eval-every 10 | --seeds 3]

Seconds are the rows' `wall_seconds`. With `--eval-every` a test half of 10,000 samples is judged, and what share of the
time that takes is told; with `--seeds` several runs are played by `shoal.compare`, and the seconds are those of a round
of all of them together.
"""

from argparse import Namespace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from jobs import JOBS, Job, asked, load, load_tests, report

import shoal


class Watch:
    """Keeps the row of every round and the time at which it came."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.times: list[float] = []

    def __call__(self, recipe: shoal.Recipe, row: dict[str, Any], history: shoal.History) -> None:
        self.rows.append(row)
        self.times.append(perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [row["wall_seconds"] for row in self.rows]

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


def data_of(job: Job, tests: int | None) -> tuple[torch.Tensor, ...]:
    """Training and test half; the latter cut to a number of samples."""
    x, y = map(torch.from_numpy, load(job))
    test_x, test_y = (torch.from_numpy(array)[0, :tests] for array in load_tests(job))
    return x.flatten(0, 1), y.flatten(), test_x, test_y


def recipe_of(job: Job, given: Namespace, rounds: int) -> dict[str, Any]:
    return {
        "data": data_of(job, None if given.eval_every else 10),
        "model": job.model,
        "split": "iid",
        "devices": job.devices,
        "sample": job.per_round,
        "epochs": job.epochs,
        "batch": job.batch,
        "lr": job.lr,
        "rounds": rounds,
        "eval_every": given.eval_every or 10**9,
        "engine": given.engine,
        "compute": given.compute,
    }


def one_run(job: Job, given: Namespace) -> tuple[list[float], dict[str, Any]]:
    watch, every = Watch(), given.eval_every
    rounds = -(-(given.rounds + 1) // every) * every if every else given.rounds + 1
    began = perf_counter()
    shoal.run("fedavg", watch=watch, **recipe_of(job, given, rounds))
    more = {"between": watch.between(), "total": perf_counter() - began, "engine": watch.rows[-1].get("engine")}
    return watch.seconds, more | ({"evaluation": watch.evaluation()} if every else {})


def many_runs(job: Job, given: Namespace) -> tuple[list[float], dict[str, Any]]:
    """The time of the whole comparison over its rounds; one with a single round only warms up."""
    seconds = []
    for rounds in (1, given.rounds + 1):
        began = perf_counter()
        shoal.compare(["fedavg"], seeds=given.seeds, **recipe_of(job, given, rounds))
        seconds.append(perf_counter() - began)
    steady = (seconds[1] - seconds[0]) / given.rounds
    return [seconds[0], seconds[1] / (given.rounds + 1)], {"runs": given.seeds, "steady": steady}


def main() -> None:
    given = asked(engine=(str, "auto"), compute=(str, "cpu"), threads=(int, 0), eval_every=(int, 0), seeds=(int, 0))
    if given.threads:
        torch.set_num_threads(given.threads)
    seconds, more = (many_runs if given.seeds else one_run)(JOBS[given.job], given)
    if given.compute != "cpu":
        more["gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
    report(seconds, version=f"shoal {shoal.__version__}, torch {torch.__version__}", **more)


if __name__ == "__main__":
    main()
