"""Processor time of `import shoal` and `shoal --help` beside `import torch`, and the start of a run: fresh processes.

    python benchmarks/startup.py

Each command is started in turns with the others, and the least of its times counts: whatever else runs on the machine
only adds to them.
"""

import argparse
import resource
import subprocess
import sys
from time import perf_counter

PYTHON = (sys.executable, "-c")
COMMANDS = {
    "import torch": (*PYTHON, "import torch"),
    "import shoal": (*PYTHON, "import shoal"),
    "shoal --help": (sys.executable, "-m", "shoal.cli", "--help"),
}
DEMO = """
import sys, time
import shoal
start, method, model, engine = time.perf_counter(), *sys.argv[1:4]
seconds = []
shoal.run(method, model=model, engine=engine, data="digits", split="dirichlet:0.1", devices=20, sample=5, rounds=3,
          epochs="2", batch=16, lr=0.05, watch=lambda *_: seconds.append(time.perf_counter() - start))
print(seconds[0], seconds[2] - seconds[1])
"""
"""A run of the README's demonstration: seconds from its call to the end of the first round, and of the third round."""
STARTS = [
    ("fedavg", "mlp", "auto"),
    ("fedavg", "mlp", "batched"),
    ("fedavg", "lenet", "batched"),
    ("fedmlb", "lenet", "batched"),
    ("fedbr", "lenet", "batched"),
]


def measure_processor_seconds(command: tuple[str, ...]) -> float:
    """Processor seconds of a process, of the user and of the system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_imports(turns: int) -> dict[str, float]:
    """The least processor seconds of each command."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(turns):
        for name, command in COMMANDS.items():
            seconds[name].append(measure_processor_seconds(command))
    return {name: min(times) for name, times in seconds.items()}


def measure_first_round(settings: tuple[str, str, str]) -> tuple[float, float]:
    """Seconds from the call of `shoal.run` to the end of the first round, and of a later round."""
    result = subprocess.run((*PYTHON, DEMO, *settings), check=True, capture_output=True, text=True)
    first, later = map(float, result.stdout.split())
    return first, later


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    start, seconds = perf_counter(), measure_imports(turns)
    torch_seconds = seconds["import torch"]
    for name, own in seconds.items():
        more = f"{own - torch_seconds:+.2f} s, {own / torch_seconds:.2f} times" if own != torch_seconds else ""
        print(f"{name:30} {own:6.2f} s of processor time  {more}")
    for settings in STARTS:
        pairs = [measure_first_round(settings) for _ in range(2)]
        for number, (first, later) in zip(("first", "second"), pairs):
            label = " ".join(settings)
            print(f"{label:30} {number} start: {first:5.2f} s to the end of round 1; a later round {later:.3f} s")
    print(f"{perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
