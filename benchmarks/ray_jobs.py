"""A Ray cluster on one machine beside the pool of processes: 1,000 small jobs each, by turns.

    python benchmarks/ray_jobs.py [--turns 7] [--out benchmarks/results/ray.md]

The job `small` of the speed benchmark (MLP 784-128-10, 60 samples, 1 epoch, batches of 10), 10 rounds of 100 devices in
a turn, two workers each. What is compared is one turn with the turns of another just before and after it, so that a
busy machine slows both; nothing is judged, and rounds in which things are set up do not count.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import ray
import torch
from peers.jobs import JOBS, load

from shoal.core.session import Session, play_round
from shoal.core.task import Engine
from shoal.data.dataset import DATASETS, Dataset
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import PoolEngine
from shoal.runs.build import Assembly, assemble_run
from shoal.runs.engine_choice import EngineChoice, build_engine
from shoal.runs.recipe import Recipe

JOB = JOBS["small"]
ROUNDS = 10
WARM = 60
"""Rounds that do not count: programs are traced in them, and Ray's store takes its memory."""
ABOUT = [
    "1,000 jobs in a turn: 10 rounds of 100 devices with 60 samples of 784 numbers, 1 epoch of an MLP 784-128-10 in",
    f"batches of 10, after {WARM} rounds that do not count. Pool and cluster play the same rounds by turns; a ratio is",
    "the time of the cluster divided by the mean of the pool's before and after it. Here are the median and the",
    "quartiles of the ratios, and the median time of the pools as a ratio to the first one's.",
]
Make = Callable[[], Engine]
PAIRS: list[tuple[str, Make, str, Make]] = [
    (
        "`--engine pool` (10 devices in a call)",
        lambda: build_engine(EngineChoice("pool", 10, 2)),
        "`--engine ray --width 10`",
        lambda: build_engine(EngineChoice("ray", 10)),
    ),
    (
        "the same processes with `serial` in each",
        lambda: PoolEngine(2, 10, SerialEngine),
        "`--engine ray` (`serial` in each actor)",
        lambda: build_engine(EngineChoice("ray")),
    ),
]
"""A pool, and the Ray cluster that does the same."""


def assemble_job() -> Assembly:
    x, y = (torch.from_numpy(array).flatten(0, 1) for array in load(JOB))
    data = Dataset("bench", x, y, x[:10], y[:10], 10)
    DATASETS["bench"] = lambda: data
    values = {"devices": JOB.devices, "sample": JOB.per_round, "epochs": JOB.epochs, "batch": JOB.batch, "lr": JOB.lr}
    return assemble_run(Recipe().with_values(data="bench", model=JOB.model, split="iid", rounds=10**6, **values))


def time_rounds(assembly: Assembly, engine: Engine, rounds: int) -> float:
    """Seconds of so many rounds with an engine, from the first round on."""
    assembly.loop.host.engine = engine
    loop = replace(assembly.loop, evaluates=lambda row: False)
    session, start = Session(loop, assembly.net, loop.start(assembly.net)), perf_counter()
    for _ in range(rounds):
        play_round(session)
    return perf_counter() - start


def compare_engines(assembly: Assembly, pool: Engine, cluster: Engine, turns: int) -> tuple[list[float], float]:
    """In each turn, the time of the cluster over the mean of the pools around it; the pools' median seconds."""
    for engine in (pool, cluster):
        time_rounds(assembly, engine, WARM)
    ratios, pool_seconds = [], [time_rounds(assembly, pool, ROUNDS)]
    for _ in range(turns):
        ray_seconds = time_rounds(assembly, cluster, ROUNDS)
        pool_seconds.append(time_rounds(assembly, pool, ROUNDS))
        ratios.append(2 * ray_seconds / sum(pool_seconds[-2:]))
    for engine in (pool, cluster):
        engine.close()
    return ratios, median(pool_seconds)


def build_table(turns: int) -> list[str]:
    assembly, first = assemble_job(), 0.0
    lines = ["| pool | its time | Ray | time beside the pool | quarter | three quarters |", "|---|--:|---|--:|--:|--:|"]
    for name, pool, other, cluster in PAIRS:
        ratios, pool_seconds = compare_engines(assembly, pool(), cluster(), turns)
        first = first or pool_seconds
        low, middle, high = quantiles(ratios, n=4)
        lines.append(f"| {name} | {pool_seconds / first:.2f} | {other} | {middle:.2f} | {low:.2f} | {high:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = build_table(args.turns)
    print("\n".join(lines))
    if args.out:
        command = f"Command: `python benchmarks/ray_jobs.py --turns {args.turns}`"
        versions = f"Ray {ray.__version__}, torch {torch.__version__}"
        head = ["# A Ray cluster on one machine beside the pool", "", f"{command}, {versions}, 2 workers each.", ""]
        Path(args.out).write_text("\n".join([*head, *ABOUT, "", *lines, ""]))


if __name__ == "__main__":
    main()
