"""Rounds per second of shoal, of plain PyTorch loops and of other frameworks, on the same jobs and data.

    python benchmarks/speed.py [--jobs standard small bigger pfl deep recurrent depthwise]
                               [--rounds N ...] [--repeats 2] [--engine auto ...]
                               [--peers flower pfl fedlab fedjax | none] [--install] [--compute cpu|cuda]
                               [--threads N] [--eval-every N] [--seeds N] [--limit 600]
                               [--out benchmarks/results/speed.md]

Every contestant is a process of its own (`benchmarks/peers`) that plays rounds of federated averaging without
evaluation, on data in memory; its first round does not count. The contestants take turns as often as `--repeats` says,
so that whatever else the machine does hits all alike, and the median of a contestant's rounds counts. Memory is the
peak of all its processes together, with what they share counted once (PSS); the mapped data is part of it.

Other frameworks live in environments of their own below `benchmarks/.peers`, which `--install` makes; pip takes torch
from wherever it is told to (PIP_INDEX_URL and the like). They run on the CPU only.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from peers.board import Score, aligned, machine, markdown, table
from peers.jobs import FOLDER, JOBS, MAIN_JOBS, make_data
from peers.meter import MARK, Meter, stop
from peers.rivals import PEERS, Contestant, contestants, install

OUT = Path(__file__).resolve().parent / "results" / "speed.md"
NOTE = """
Federated averaging, no evaluation, data in memory, first round excluded. Contestants are processes of their own that
take turns; the median of all rounds of a contestant counts. The ratio is to the best plain PyTorch loop of the same
table: 2 is twice as fast. Memory is the peak of all processes of a contestant, with shared pages counted once; it
includes the data.
""".strip()


def main() -> None:
    args = parse_arguments()
    if args.install:
        for name in args.peers:
            install(name)
    for job in args.jobs:
        make_data(JOBS[job])
    head = [f"{key}: {value}" for key, value in machine().items()]
    print("\n".join(head), flush=True)
    tables = {}
    for job, rounds in zip(args.jobs, args.rounds):
        scores = take_turns(contestants(args, JOBS[job]), job, rounds, args.repeats, args.limit)
        tables[job] = table(scores, args.compute)
        print(f"\n{job}: {describe_job(job, rounds, args.repeats)}\n\n{aligned(tables[job])}", flush=True)
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(build_page(args, head, tables), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(MAIN_JOBS))
    parser.add_argument("--rounds", nargs="+", type=int, help="timed rounds: one number, or one per job")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--engine", nargs="+", action="extend", help="engines of shoal, auto if none is named")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of shoal; 0 leaves the choice to it")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, "none"], default=list(PEERS))
    parser.add_argument("--install", action="store_true", help="make the environments of the peers first")
    parser.add_argument("--compute", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--eval-every", type=int, default=0, help="also what evaluating every N rounds costs")
    parser.add_argument("--seeds", type=int, default=0, help="also N runs of shoal at once")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a contestant is stopped")
    parser.add_argument("--out", default=str(OUT), help="Markdown file; none with an empty name")
    args = parser.parse_args()
    args.engine = args.engine or ["auto"]
    args.peers = [name for name in args.peers if name != "none"]
    args.rounds = args.rounds or [JOBS[job].rounds for job in args.jobs]
    args.rounds = args.rounds * len(args.jobs) if len(args.rounds) == 1 else args.rounds
    if len(args.rounds) != len(args.jobs):
        parser.error(f"--rounds has {len(args.rounds)} numbers for {len(args.jobs)} jobs")
    if min(*args.rounds, args.repeats) < 1:
        parser.error("--rounds and --repeats must be at least 1")
    return args


def take_turns(rivals: Sequence[Contestant], job: str, rounds: int, repeats: int, limit: float) -> list[Score]:
    """Every contestant once, then every one again; who fails is left out from there on."""
    scores = [Score(rival, problem=rival.absent) for rival in rivals]
    for repeat in range(repeats):
        for score in scores:
            if not score.problem:
                start = time.perf_counter()
                play_contestant(score, job, rounds, limit)
                outcome = score.problem or f"{score.round:.3f} s a round"
                took = time.perf_counter() - start
                print(f"  {job} {repeat + 1}/{repeats} {score.contestant.title}: {outcome} ({took:.0f} s)", flush=True)
    return scores


def play_contestant(score: Score, job: str, rounds: int, limit: float) -> None:
    """Let a contestant play once, and add its seconds and memory to its score."""
    mark = uuid.uuid4().hex
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{job}-{score.contestant.title.replace(' ', '-').replace(',', '')}.txt"
    with log.open("w") as file, Meter(mark) as meter:
        command = score.contestant.command(job, rounds)
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {MARK: mark})
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(mark)
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    reports = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    if code is None:
        score.problem = f"stopped after {limit:.0f} s"
    elif code or not reports:
        score.problem = f"failed: {find_error_line(lines)}"
    else:
        score.add(reports[-1], meter.peak)


def find_error_line(lines: Sequence[str]) -> str:
    """The last line that looks like an error."""
    candidates = [line.strip() for line in lines if "Error" in line] or [line.strip() for line in lines if line.strip()]
    return candidates[-1][:120] if candidates else "no output"


def describe_job(job: str, rounds: int, repeats: int) -> str:
    return f"{JOBS[job].title}, batch {JOBS[job].batch}; {repeats} x {rounds} timed rounds"


def build_page(args: argparse.Namespace, head: Sequence[str], tables: dict[str, list[list[str]]]) -> str:
    """The report as Markdown."""
    text = [
        "# Speed",
        f"Command: `{shlex.join(['python', 'benchmarks/speed.py', *sys.argv[1:]])}`.",
        "\n".join(f"- {line}" for line in head),
        NOTE,
    ]
    for (job, rows), rounds in zip(tables.items(), args.rounds):
        text += [f"## {job}", describe_job(job, rounds, args.repeats) + ".", markdown(rows)]
    return "\n\n".join(text) + "\n"


if __name__ == "__main__":
    main()
