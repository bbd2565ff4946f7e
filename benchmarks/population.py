"""Cost grows with the devices that take part, not with the population: a thousand devices beside a million.

    python benchmarks/population.py [--rounds 20]

Each population runs in a process of its own; seconds until the first round begins (imports aside), the median round,
and the most memory the process ever held.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from statistics import median


def measure(devices: int, rounds: int) -> None:
    import torch

    from shoal.core.session import Session, play_round
    from shoal.runs.build import assemble_run
    from shoal.runs.recipe import Recipe

    torch.set_num_threads(1)
    began = time.perf_counter()
    recipe = Recipe().with_values(
        split="virtual:60", devices=devices, sample=100, batch=10, eval_every=10**6, rounds=10**6
    )
    assembly = assemble_run(recipe)
    session = Session(assembly.loop, assembly.net, assembly.loop.start(assembly.net))
    setup_seconds = time.perf_counter() - began
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        play_round(session)
        seconds.append(time.perf_counter() - began)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"devices": devices, "start": setup_seconds, "round": median(seconds[1:]), "memory": memory}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", type=int, default=0)
    args = parser.parse_args()
    if args.only:
        return measure(args.only, args.rounds)
    print("| devices | start, s | round, s | memory, MiB |\n|---|---|---|---|")
    for devices in (1_000, 1_000_000):
        command = [sys.executable, __file__, "--only", str(devices), "--rounds", str(args.rounds)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {devices:,} | {row['start']:.2f} | {row['round']:.3f} | {row['memory']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
