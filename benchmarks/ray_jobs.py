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
from statistics import median
from time import perf_counter

import ray
import torch
from peers.jobs import JOBS, load

from shoal.assemble import Assembly, assemble
from shoal.data.dataset import DATASETS, Dataset
from shoal.engines.batched import Batched
from shoal.engines.crew import Crew
from shoal.engines.pool import Pool
from shoal.engines.ray_crew import Cluster
from shoal.engines.serial import Serial
from shoal.recipe import Recipe
from shoal.testing import machine_of

JOB = JOBS["small"]
ROUNDS = 10
ABOUT = [
    "1,000 jobs in a turn: 10 rounds of 100 devices with 60 samples of 784 numbers, 1 epoch of an MLP 784-128-10 in",
    "batches of 10. All crews play the same rounds by turns; a row is the median over the turns of the time that a",
    "crew takes, divided by the time that the first one takes in the turns before and after it, with the extremes.",
    "",
    "On a processor the engine `ray` has `serial` in each actor, so that its bits are those of `serial`; the first two",
    "rows compare like with like. The engine `pool` puts several devices into one call, which changes the last bits.",
]
CREWS: dict[str, Callable[[], Crew]] = {
    "pool, `serial` in each process": lambda: Pool(2, 10, Serial),
    "ray, `serial` in each actor (the engine `ray`)": lambda: Cluster(workers=2),
    "pool, 10 devices in a call (the engine `pool`)": lambda: Pool(2, 10, lambda: Batched(10)),
}


def put_together() -> Assembly:
    x, y = (torch.from_numpy(array).flatten(0, 1) for array in load(JOB))
    data = Dataset("bench", x, y, x[:10], y[:10], 10)
    DATASETS["bench"] = lambda: data
    given = {"devices": JOB.devices, "sample": JOB.per_round, "epochs": JOB.epochs, "batch": JOB.batch, "lr": JOB.lr}
    return assemble(Recipe().revised(data="bench", model=JOB.model, split="iid", rounds=10**6, **given))


def seconds(assembly: Assembly, crew: Crew, rounds: int) -> float:
    """What so many rounds take with a crew, from the first."""
    machine_of(assembly.loop).crew = crew
    loop = replace(assembly.loop, evaluates=lambda row: False)
    standing, began = loop.start(assembly.net), perf_counter()
    for number in range(rounds):
        standing, _ = loop.play(standing, number)
    return perf_counter() - began


def measured(turns: int) -> dict[str, list[float]]:
    """For every crew the ratios to the first, which plays before and after each of them."""
    assembly = put_together()
    crews = {name: make() for name, make in CREWS.items()}
    for crew in crews.values():
        seconds(assembly, crew, 3)
    (_, first), *others = crews.items()
    found: dict[str, list[float]] = {name: [] for name in crews}
    before = seconds(assembly, first, ROUNDS)
    for _ in range(turns):
        for name, crew in others:
            own, after = seconds(assembly, crew, ROUNDS), seconds(assembly, first, ROUNDS)
            found[name].append(2 * own / (before + after))
            found[next(iter(found))].append(2 * after / (before + after))
            before = after
    for crew in crews.values():
        crew.close()
    return found


def table(found: dict[str, list[float]]) -> list[str]:
    lines = ["| crew | time beside the first | from | to |", "| --- | --: | --: | --: |"]
    for name, ratios in found.items():
        lines.append(f"| {name} | {median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = table(measured(given.turns))
    print("\n".join(lines))
    if given.out:
        command = f"Command: `python benchmarks/ray_jobs.py --turns {given.turns}`"
        versions = f"Ray {ray.__version__}, torch {torch.__version__}"
        head = ["# A Ray cluster on one machine beside the pool", "", f"{command}, {versions}, 2 workers each.", ""]
        Path(given.out).write_text("\n".join([*head, *ABOUT, "", *lines, ""]))


if __name__ == "__main__":
    main()
