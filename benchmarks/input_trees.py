"""What inputs that are a dict or a tuple cost beside one tensor of the same numbers: a round of local training.

    python benchmarks/input_trees.py [--repeats 20] [--out benchmarks/results/input_trees.md]

The model is a perceptron over 20 + 12 numbers, which joins what it is given: one tensor, a tuple or a dict of two, or
two arguments. Ten devices of 64 samples make ten steps each in a round. Times are medians of seconds of the processor,
one thread, in turns, so that what else the machine does meets all alike.
"""

import argparse
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.runs.build import assemble_run
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import play_rounds

DEVICES, STEPS = 10, 10


class Joined(nn.Module):
    """Two layers over all numbers of a sample."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, dict):
            inputs = inputs["left"], inputs["right"]
        x = inputs if isinstance(inputs, Tensor) else torch.cat(inputs, 1)
        return self.head(self.hidden(x).relu())


class TwoArguments(Joined):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return super().forward((left, right))


def make_cases() -> dict[str, tuple[Any, nn.Module]]:
    """By name the inputs and the module that takes them."""
    x = torch.randn(800, 32, generator=torch.Generator().manual_seed(0))
    pair = x[:, :20].contiguous(), x[:, 20:].contiguous()
    named = dict(zip(("left", "right"), pair))
    return {
        "one tensor": (x, Joined()),
        "a tuple of two": (pair, Joined()),
        "a dict of two": (named, Joined()),
        "a dict, an argument for each": (named, TwoArguments()),
    }


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """By engine and case the seconds of a round."""
    found: dict[str, dict[str, float]] = {}
    for engine_name, make_engine in (("serial", SerialEngine), ("batched", lambda: BatchedEngine(DEVICES))):
        loops, states, seconds = {}, {}, {}
        for name, (x, module) in make_cases().items():
            keys = {
                "devices": DEVICES,
                "sample": DEVICES,
                "split": "iid",
                "batch": 16,
                "steps": STEPS,
                "eval_every": 10**6,
            }
            values = hand_over_objects({"data": (x, torch.arange(800) % 10), "model": module, **keys})
            assembly = assemble_run(Recipe().with_values(**values))
            assembly.loop.host.engine = make_engine()
            loops[name], states[name], seconds[name] = assembly.loop, assembly.loop.start(assembly.net), []
        for number in range(repeats + 2):
            for name, loop in loops.items():
                start = process_time()
                states[name], _ = play_rounds(loop, states[name], number, number + 1)
                if number > 1:  # the first ones set up
                    seconds[name].append(process_time() - start)
        found[engine_name] = {name: median(own) for name, own in seconds.items()}
    return found


def write_table(times: dict[str, dict[str, float]], repeats: int) -> str:
    lines = [
        "# Inputs of several tensors",
        "",
        f"Command: `python benchmarks/input_trees.py --repeats {repeats}`, torch {torch.__version__}.",
        "",
        f"A round of {DEVICES} devices with {STEPS} steps each; milliseconds of the processor.",
        "",
        "| inputs | serial | beside one tensor | batched | beside one tensor |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in times["serial"]:
        cells = []
        for own in times.values():
            cells += [f"{own[name] * 1e3:.1f}", f"{own[name] / own['one tensor']:.2f}x"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = write_table(measure(given.repeats), given.repeats)
    print(table)
    if given.out:
        given.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
