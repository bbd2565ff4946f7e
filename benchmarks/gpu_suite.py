"""The figures of a GPU in one go: all processes prepare side by side, and are timed one at a time.

    python benchmarks/gpu_suite.py [--only standard resnet18] [--compute cuda] [--side-by-side 16] [--prepare 240]
                                   [--out FOLDER]

To trace, compile and record takes most of the time of a benchmark on a GPU, and needs a core of the processor alone. So
every process stops when it is about to time something (`peers/turn.py`) and goes on when it is the only one; so many
prepare side by side, each with a few GB of memory. `--only` takes what begins with these names. What a process printed
lies in FOLDER/NAME.txt, all of it together in FOLDER/suite.txt, and a table says how each ended.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import TextIO

from peers.jobs import JOBS, make_data
from peers.turn import TURN

HERE = Path(__file__).resolve().parent
MODELS = ("resnet18-imagenet", "resnet18-imagenet-gn", "vgg11", "vit", "lstm")
ROUNDS = {"standard": (2, 20), "small": (6, 40), "bigger": (2, 12), "pfl": (4, 40)}
"""Timed rounds of the plain loop, and of shoal."""


@dataclass(frozen=True)
class Entry:
    """A process to be timed; one that comes `again` starts when all others are over, and finds their caches full."""

    name: str
    command: tuple[str, ...]
    again: bool = False


def list_entries(compute: str) -> list[Entry]:
    """Everything that is timed, in the order of its importance."""
    entries = []
    for job, (plain, ours) in ROUNDS.items():
        entries.append(Entry(f"{job}-plain", ("peers/plain.py", job, str(plain), "--compute", compute)))
        entries.append(Entry(f"{job}-shoal", ("peers/ours.py", job, str(ours), "--compute", compute)))
        seeds = ("--seeds", "10", "--workers", "0" if job == "small" else "1", "--compute", compute)
        several = job == "small"  # processes of their own, which nobody stops in the middle
        entries.append(Entry(f"{job}-shoal-10-seeds", ("peers/ours.py", job, str(ours // 2), *seeds), again=several))
    for model in MODELS:
        for precision in ("auto", "bf16"):
            for rule in ("now", "plain", *(["grouped"] if model == MODELS[0] else [])):
                words = ("--models", model, "--precisions", precision, "--rules", rule, "--compute", compute)
                limits = ("--sections", "steps", "--seconds", "9999", "--variant-seconds", "9999")
                entries.append(Entry(f"{model}-{precision}-{rule}", ("large_models.py", *words, *limits)))
    hybrid = ("--models", "resnet18-imagenet", "--batch", "50", "--samples", "200", "--rounds", "4")
    entries.append(Entry("hybrid", ("hybrid_paths.py", *hybrid, "--compute", compute)))
    adapters = ("adapters.py", "--rounds", "5", "--precision", "tf32", "--compute", compute)
    entries.append(Entry("adapters-speed", (*adapters, "--case", "speed")))
    for devices in ("1", "5", "10", "20"):
        case = ("--case", "memory", "--devices", devices, "--split", "iid")
        entries.append(Entry(f"adapters-memory-{devices}", (*adapters, *case)))
    for job in ("standard", "bigger"):
        entries.append(Entry(f"{job}-again", ("peers/ours.py", job, "4", "--compute", compute), again=True))
    again = ("--models", MODELS[0], "--precisions", "auto", "--rules", "now", "--compute", compute)
    entries.append(Entry("resnet18-again", ("large_models.py", "--sections", "steps", *again), again=True))
    return entries


class Contestant:
    """A started process."""

    def __init__(self, entry: Entry, turns: Path, out: Path):
        self.entry, self.turn, self.log = entry, turns / entry.name, out / f"{entry.name}.txt"
        script, *words = entry.command
        environment = os.environ | {TURN: str(self.turn), "PYTHONUNBUFFERED": "1"}
        self.start = perf_counter()
        with self.log.open("w") as file:
            command = [sys.executable, str(HERE / script), *words]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    @property
    def is_prepared(self) -> bool:
        return Path(f"{self.turn}.ready").exists() or self.process.poll() is not None

    def take_turn(self, limit: float) -> str:
        """Let it go on to its end; how it ended."""
        prepared, begun = self.is_prepared, perf_counter()
        Path(f"{self.turn}.go").touch()
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"stopped after {limit:.0f} s"
        note = "" if prepared else ", was not prepared"
        return f"{'done' if code == 0 else f'failed with {code}'} in {perf_counter() - begun:.1f} s{note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names")
    parser.add_argument("--compute", default="cuda")
    parser.add_argument("--side-by-side", type=int, default=16, help="processes that prepare at the same time")
    parser.add_argument("--prepare", type=float, default=240.0, help="seconds for those side by side to prepare")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one turn")
    parser.add_argument("--total", type=float, default=1e9, help="seconds after which nothing more is started")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-suite"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun, turns = perf_counter(), Path(tempfile.mkdtemp(prefix="turns-"))
    entries = [e for e in list_entries(args.compute) if any(e.name.startswith(name) for name in args.only)]
    for job in ROUNDS:
        if any(e.name.startswith(f"{job}-") for e in entries):
            make_data(JOBS[job])
    first = [entry for entry in entries if not entry.again]
    batches = [first[at : at + args.side_by_side] for at in range(0, len(first), args.side_by_side)]
    with (args.out / "suite.txt").open("w") as book:
        for batch in [*batches, *([entry] for entry in entries if entry.again)]:
            if perf_counter() - begun < args.total:
                time_batch([Contestant(entry, turns, args.out) for entry in batch], args.prepare, args.limit, book)


def time_batch(contestants: list[Contestant], prepare: float, limit: float, book: TextIO) -> None:
    """Wait until all are prepared, or for so many seconds, and let them take their turns, the prepared ones first."""
    begun = perf_counter()
    try:
        while len(contestants) > 1 and not all(c.is_prepared for c in contestants) and perf_counter() - begun < prepare:
            sleep(0.1)
        if len(contestants) > 1:
            ready = sum(c.is_prepared for c in contestants)
            print(f"{ready} of {len(contestants)} prepared after {perf_counter() - begun:.0f} s", flush=True)
        for contestant in sorted(contestants, key=lambda c: not c.is_prepared):
            show_end(contestant, limit, book)
    finally:
        for contestant in contestants:
            contestant.process.kill()


def show_end(contestant: Contestant, limit: float, book: TextIO) -> None:
    """Let a process take its turn, print the last line that it wrote, and copy all of them into the book."""
    ended = contestant.take_turn(limit)
    text = contestant.log.read_text(errors="replace")
    print(f"{contestant.entry.name}: {ended}: {(text.splitlines() or [''])[-1][:400]}", flush=True)
    book.write(f"## {contestant.entry.name}: {ended}\n{text}\n")
    book.flush()


if __name__ == "__main__":
    main()
