"""FedMLB and FedBR beside FedAvg: devices that distil from different numbers of blocks, many of them in one call.

    python benchmarks/hybrid_paths.py [--models lenet resnet8] [--rounds 6] [--devices 10] [--width 10] [--compute cpu]
                                      [--out benchmarks/results/hybrid_paths.md]

All devices of a round train side by side in the engine `batched`. The methods take turns, round by round, in one
process; a row has the median seconds of a round after the first two, how many programs were traced until then, and how
many calls of a program a round makes. `resnet8` is a residual net of 6 blocks with batch norm and few channels.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from peers.turn import wait_for_turn
from torch import Tensor, nn

import shoal
from shoal.core.session import Session, play_round
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.graph import StepProgram
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe

METHODS = ("fedavg", "fedmlb", "fedbr")
SETTLING = 2
"""Rounds that do not count: programs are traced in them."""


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (out + self.shortcut(x)).relu()


def build_resnet8() -> nn.Module:
    """ResNet18's six blocks with 8 to 32 channels and one residual block each."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    stages = [ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2), ResidualBlock(32, 32, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(stem, *stages, head)


class CountingEngine(BatchedEngine):
    """The engine `batched`, which counts the calls of its programs."""

    calls = 0

    def get_program(self, *args, **kwargs) -> StepProgram:
        program = super().get_program(*args, **kwargs)

        def call_program(*flat: Tensor):
            self.calls += 1
            return program.call(*flat)

        return StepProgram(program.module, program.reads, program.peak, call_program)


class Contender:
    """One method on its own engine."""

    def __init__(self, method: str, model: str, args: argparse.Namespace):
        generator = torch.Generator().manual_seed(0)
        count = args.devices * args.samples
        x, y = torch.rand(count, 3, 32, 32, generator=generator), torch.arange(count) % 10
        values = {
            "method": method,
            "model": build_resnet8() if model == "resnet8" else model,
            "data": (x, y, x[:10], y[:10]),
            "devices": args.devices,
            "sample": args.devices,
            "split": "iid",
            "batch": args.batch,
            "epochs": 1,
            "lr": 0.01,
            "compute": args.compute,
            "eval_every": 10**9,
        }
        assembly = assemble_run(Recipe().with_values(**shoal.hand_over_objects(values)))
        self.method, self.blocks = method, len(assembly.net.blocks)
        self.engine = assembly.loop.host.engine = CountingEngine(args.width)
        self.session = Session(assembly.loop, assembly.net)
        self.seconds: list[float] = []
        self.calls: list[int] = []

    def play_round(self) -> None:
        before, start = self.engine.calls, perf_counter()
        play_round(self.session)
        if self.engine.replays:  # work that a GPU has not finished yet
            torch.cuda.synchronize()
        self.seconds.append(perf_counter() - start)
        self.calls.append(self.engine.calls - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet8"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--compute", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| model | method | seconds a round | to FedAvg's | to FedMLB's | programs traced | calls a round |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for model in args.models:
        contenders = [Contender(method, model, args) for method in METHODS]
        for number in range(SETTLING + args.rounds):
            if number == SETTLING:
                wait_for_turn()
            for contender in contenders:
                contender.play_round()
        rounds = {c.method: median(c.seconds[SETTLING:]) for c in contenders}
        for c in contenders:
            seconds, calls = rounds[c.method], sum(c.calls[SETTLING:]) / args.rounds
            ratios = f"{seconds / rounds['fedavg']:.2f} | {seconds / rounds['fedmlb']:.2f}"
            name = f"{model} ({c.blocks} blocks)"
            lines.append(f"| {name} | {c.method} | {seconds:.3f} | {ratios} | {len(c.engine.programs)} | {calls:.1f} |")
            print(lines[-1], flush=True)
    if args.out:
        options = " ".join(
            f"--{name} {getattr(args, name)}" for name in ("rounds", "devices", "samples", "batch", "width")
        )
        command = (
            f"python benchmarks/hybrid_paths.py --models {' '.join(args.models)} {options} --compute {args.compute}"
        )
        head = [
            "# Devices that distil from different numbers of blocks, in one call",
            "",
            f"Command: `{command}`, torch {torch.__version__}, 1 thread.",
            "",
        ]
        args.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
