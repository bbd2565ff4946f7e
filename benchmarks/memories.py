"""Device memories as large as a model: how much RAM they take when most of them are on disk.

    python benchmarks/memories.py [--devices 200] [--sample 10] [--memory-mb 512] [--out benchmarks/results/memories.md]

Devices take turns to train ResNet18 (45 MB) with FedBR, which makes each remember the model it came to; after all were
there once, half of them come again. Each has two samples, so that it is the memories that count. The peak is that of
the process, data and engine included.
"""

import argparse
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import ClassVar

import torch

from shoal.core.model.tree import Tree, count_tree_bytes
from shoal.core.part import Part
from shoal.core.session import Session, play_round
from shoal.core.types import Round
from shoal.data.dataset import DATASETS, Dataset
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe


@dataclass(frozen=True)
class InTurn(Part):
    """select: the next devices, round the end."""

    sets: ClassVar = frozenset({"select"})

    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        first = round.number * round.sample
        return sorted((first + i) % len(round.sizes) for i in range(round.sample)), state


def draw_dataset(samples: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples + 10, 3, 32, 32, generator=generator)
    y = torch.randint(10, (samples + 10,), generator=generator)
    return Dataset("bench", x[:samples], y[:samples], x[samples:], y[samples:], 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--sample", type=int, default=10)
    parser.add_argument("--memory-mb", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    DATASETS["bench"] = lambda: draw_dataset(2 * args.devices)
    recipe = Recipe().with_values(
        data="bench",
        model="resnet18-imagenet-gn",
        method="inturn+fedbr",
        parts=(__file__,),
        split="iid",
        devices=args.devices,
        sample=args.sample,
        steps="1",
        batch=2,
        memory_mb=args.memory_mb,
        engine="serial",
    )
    start = perf_counter()
    with TemporaryDirectory() as folder:
        assembly = assemble_run(recipe, Path(folder))
        loop = replace(assembly.loop, evaluates=lambda row: False)
        session, rounds = Session(loop, assembly.net), 3 * args.devices // (2 * args.sample)
        for number in range(rounds):
            play_round(session)
            if number % 10 == 9:
                print(f"{number + 1} of {rounds} rounds, peak {get_peak_gb():.2f} GB", flush=True)
        size = count_tree_bytes(assembly.memory.get(0))
    line = (
        f"{args.devices} devices remember {size / 1e6:.1f} MB each, {size * args.devices / 1e9:.1f} GB in all; "
        f"{rounds} rounds of {args.sample} in {perf_counter() - start:.0f} s, peak RAM {get_peak_gb():.2f} GB."
    )
    print(line)
    if args.out:
        options = f"--devices {args.devices} --sample {args.sample} --memory-mb {args.memory_mb}"
        command = f"python benchmarks/memories.py {options}"
        args.out.write_text(f"# Memories of devices\n\nCommand: `{command}`, torch {torch.__version__}.\n\n{line}\n")


def get_peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    main()
