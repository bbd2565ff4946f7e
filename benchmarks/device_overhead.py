"""The Python around a device of the engine `batched`: microseconds a round takes for each, beside its arithmetic.

    python benchmarks/device_overhead.py [--rounds 40] [--out benchmarks/results/device_overhead.md]

The sizes are those of the small job of `benchmarks/speed.py` (100 of 1000 devices, 60 samples, 6 steps, all devices in
one call), with a model of 3,466 weights, and with a program that returns what it is given instead of training: what is
left is what a GPU, which trains a hundred such devices in a millisecond, waits for.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

import shoal
from shoal.core.session import Session, play_round_of_each
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.graph import StepProgram
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe

DEVICES = 100


class IdleEngine(BatchedEngine):
    """The engine `batched` with programs that do not train."""

    def get_program(self, *args, **kwargs) -> StepProgram:
        program = super().get_program(*args, **kwargs)
        carried = 4  # the weights and biases of the two layers
        call: Callable = lambda *flat: (list(flat[:carried]), flat[0].new_zeros(len(flat[0])))  # noqa: E731
        return StepProgram(program.module, program.reads, program.peak, call)


def measure(runs: int, rounds: int) -> float:
    """Microseconds a device, the median over rounds of all runs together."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(60_000, 16, generator=generator), torch.arange(60_000) % 10
    data: tuple[Tensor, ...] = (x, y, x[:10], y[:10])
    values = {"data": data, "model": "mlp", "split": "iid", "devices": 1000, "sample": DEVICES, "epochs": 1}
    values |= {"batch": 10, "lr": 0.01, "eval_every": 10**9, "compute": "cpu"}
    engine, sessions = IdleEngine(DEVICES * runs), []
    for seed in range(runs):
        assembly = assemble_run(Recipe().with_values(**shoal.hand_over_objects(values), seed=seed))
        sessions.append(Session(assembly.loop, assembly.net))
    seconds = []
    for _ in range(3 + rounds):
        start = perf_counter()
        play_round_of_each(sessions, engine)
        seconds.append(perf_counter() - start)
    return 1e6 * median(seconds[3:]) / DEVICES / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| runs at once | devices in a call | us a device |", "| --: | --: | --: |"]
    for runs in (1, 10):
        lines.append(f"| {runs} | {DEVICES * runs} | {measure(runs, max(3, args.rounds // runs)):.0f} |")
        print(lines[-1], flush=True)
    if args.out:
        command = f"python benchmarks/device_overhead.py --rounds {args.rounds}"
        head = ["# Python around a device", "", f"Command: `{command}`, torch {torch.__version__}, 1 thread.", ""]
        args.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
