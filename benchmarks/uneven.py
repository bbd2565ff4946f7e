"""Seconds of a round where devices have unequal numbers of samples and images are augmented, as most experiments have.

    python benchmarks/uneven.py [--models lenet cnn] [--splits iid dirichlet:0.1] [--seeds 1 3] [--rounds 6]
                                [--devices 100] [--sample 10] [--samples 50000] [--compute cuda]

10 of 100 devices, 5 epochs, batches of 10, images in the shape of CIFAR-10; several seeds are played side by side by
`shoal.compare`. The plain loop trains one device after the other with the same crops and flips, drawn for a batch at a
time on the compute device. Seconds are medians over all rounds but the first two; `steps` are those of the device with
most of them, and `busy` the share of steps that the devices of a round have of those that the longest one has.
"""

import argparse
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from deterministic import draw_dataset

import shoal
from shoal.data.augment import parse_augment
from shoal.data.dataset import DATASETS
from shoal.runs.build import Assembly, assemble_run
from shoal.runs.recipe import Recipe

SETTING: dict[str, Any] = {"data": "bench", "epochs": 5, "batch": 10, "lr": 0.01, "eval_every": 10**6}
AUGMENT = "crop:4,flip"
WARM_UP = 5
"""Steps of the plain loop that are not timed."""


def time_plain_loop(assembly: Assembly, augmented: bool, devices: int) -> tuple[float, int]:
    """The seconds of a local step of a plain loop over some devices, and how many steps it made."""
    augment = parse_augment(AUGMENT) if augmented else None
    module, setup = assembly.net.module, assembly.loop.host.setup
    place, steps, begun = assembly.net.place, 0, 0.0
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for device in range(devices):
        samples = setup.samples(device)
        for rows in torch.randperm(len(samples), generator=generator).split(10)[:40]:
            batch = samples.take_batch(samples.index[rows])
            inputs = batch.inputs
            if augment:
                words = torch.randint(0, 1 << 32, (len(rows) * augment.words,), generator=generator)
                drawn = augment.read_draws(words, [len(rows)], len(rows))
                inputs = augment.transform_images(inputs, [own[0].to(place) for own in drawn])
            optimiser.zero_grad()
            F.cross_entropy(module(inputs), batch.targets[0][0]).backward()
            optimiser.step()
            steps += 1
            if steps == WARM_UP:
                begun = wait_for(place)
    return (wait_for(place) - begun) / (steps - WARM_UP), steps


def wait_for(place: torch.device) -> float:
    """The time when all that was started is done."""
    if place.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def time_rounds(values: dict[str, Any], seeds: int, rounds: int) -> float:
    """The median seconds of a round of all seeds together."""
    times: dict[int, float] = {}

    def note_time(recipe: Recipe, row: dict[str, Any], history: shoal.History) -> None:
        times[row["round"]] = perf_counter()

    shoal.compare(["fedavg"], seeds=seeds, rounds=rounds, watch=note_time, progress=False, **values)
    ends = [times[number] for number in sorted(times)]
    return median(later - sooner for sooner, later in zip(ends[1:], ends[2:]))


def count_steps(assembly: Assembly, sample: int) -> tuple[int, float]:
    """The steps of the longest device of the first round, and the share of them that all have."""
    loop = assembly.loop
    sizes = sorted((5 * -(-int(size) // 10) for size in loop.sizes), reverse=True)[:: max(1, len(loop.sizes) // sample)]
    return sizes[0], sum(sizes) / len(sizes) / sizes[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["lenet", "cnn"])
    parser.add_argument("--splits", nargs="+", default=["iid", "dirichlet:0.1"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 3])
    for name, value in {"rounds": 6, "devices": 100, "sample": 10, "samples": 50_000}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compute", default="cpu")
    given = parser.parse_args()
    data = draw_dataset(given.samples)
    DATASETS["bench"] = lambda: data
    print("| model | split | images | seeds | s a round | plain loop, s | ratio | steps | busy |", flush=True)
    print("|---|---|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for model in given.models:
        for split in given.splits:
            for augmented in (False, True):
                values = SETTING | {"model": model, "split": split, "augment": AUGMENT if augmented else ""}
                values |= {"devices": given.devices, "sample": given.sample, "compute": given.compute}
                assembly = assemble_run(Recipe().with_values(**values))
                step_seconds, _ = time_plain_loop(assembly, augmented, min(5, given.devices))
                longest, busy = count_steps(assembly, given.sample)
                mean_steps = sum(5 * -(-int(size) // 10) for size in assembly.loop.sizes) / given.devices
                for seeds in given.seeds:
                    plain = step_seconds * mean_steps * given.sample * seeds
                    seconds = time_rounds(values, seeds, given.rounds)
                    cells = [model, split, AUGMENT if augmented else "as they are", str(seeds)]
                    cells += [f"{seconds:.3f}", f"{plain:.2f}", f"{plain / seconds:.1f}", str(longest), f"{busy:.2f}"]
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
