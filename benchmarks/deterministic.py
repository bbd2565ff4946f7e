"""What `deterministic = true` gives on a GPU, and what it costs: each run twice with one seed, with it and without.

    python benchmarks/deterministic.py [--method fedbr] [--models lenet resnet18-imagenet-gn] [--rounds 6]
                                       [--compute cuda] [--out benchmarks/results/deterministic.md]

Every run is a process of its own, as a repetition would be; with and without take turns. Data are drawn in the shape of
CIFAR-10, with classes that can be told apart; the setting is that of `shoal reproduce fedbr-2`. It needs torch,
NumPy and safetensors alone. Seconds are medians over the rounds of both runs but the first of each (set-up).
"""

import argparse
import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shoal
from shoal.data.dataset import DATASETS, Dataset

CLASSES, SHAPE = 10, (3, 32, 32)
SETTING: dict[str, Any] = {
    "split": "dominant:7",
    "devices": 100,
    "sample": 10,
    "epochs": 5,
    "batch": 50,
    "lr": 0.1,
    "lr_decay": 0.998,
    "weight_decay": 0.001,
    "clip": 10.0,
    "normalise": True,
    "augment": "flip,crop:4",
}


def draw_dataset(samples: int) -> Dataset:
    """So many training samples around a mean for each class, and a fifth of them to test on."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(samples + samples // 5) % CLASSES
    means = torch.randn(CLASSES, *SHAPE, generator=generator) * 0.1
    x = torch.randn(len(y), *SHAPE, generator=generator) + means[y]
    return Dataset("bench", x[:samples], y[:samples], x[samples:], y[samples:], CLASSES)


def play_and_print(args: argparse.Namespace) -> None:
    """Play one run and print as JSON its rows, the hash of its weights, and the seconds of its rounds."""
    data = draw_dataset(args.samples)
    DATASETS["bench"] = lambda: data
    values = {"model": args.models[0], "rounds": args.rounds, "compute": args.compute}
    result = shoal.run(args.method, data="bench", deterministic=args.deterministic, **SETTING | values)
    weights = sha256(b"".join(v.cpu().numpy().tobytes() for _, v in sorted(result.params.items()))).hexdigest()
    rows = [{k: v for k, v in row.items() if k != "wall_seconds"} for row in result.history.rows]
    seconds = [row["wall_seconds"] for row in result.history.rows]
    print(json.dumps({"rows": rows, "weights": weights, "seconds": seconds, "engine": str(result.engine)}))


def play_in_process(args: argparse.Namespace, model: str, deterministic: bool) -> dict[str, Any]:
    """What `play_and_print` prints, played in a process of its own."""
    options = {"method": args.method, "models": model, "rounds": args.rounds, "compute": args.compute}
    options |= {"samples": args.samples}
    command = [sys.executable, __file__, "--play", *(f"--{k}={v}" for k, v in options.items())]
    command += ["--deterministic"] if deterministic else []
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def format_row(model: str, deterministic: bool, runs: list[dict[str, Any]], base_seconds: float) -> str:
    """A row of the table."""
    one, other = runs
    rows = sum(a == b for a, b in zip(one["rows"], other["rows"]))
    ends = " and ".join(f"{run['rows'][-1]['accuracy']:.4f}" for run in runs)
    weights = "the same bits" if one["weights"] == other["weights"] else "differ"
    seconds = median_seconds(runs)
    cells = [model, str(deterministic).lower(), f"{rows} of {len(one['rows'])}", weights, ends]
    return f"| {' | '.join(cells)} | {seconds:.3f} | {seconds / base_seconds:.2f} | {one['engine']} |"


def median_seconds(runs: list[dict[str, Any]]) -> float:
    return median(s for run in runs for s in run["seconds"][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedbr")
    parser.add_argument("--models", nargs="+", default=["lenet", "resnet18-imagenet-gn"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--compute", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deterministic", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        return play_and_print(args)
    lines = [
        "| model | deterministic | equal rows | weights | accuracies | s a round | ratio | engine |",
        "| --- | --- | --: | --- | --- | --: | --: | --- |",
    ]
    for model in args.models:
        runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for deterministic in (False, True, True, False):
            runs[deterministic].append(play_in_process(args, model, deterministic))
        base_seconds = median_seconds(runs[False])
        lines += [format_row(model, deterministic, own, base_seconds) for deterministic, own in runs.items()]
        print("\n".join(lines[-2:]), flush=True)
    if args.out:
        options = f"--method {args.method} --models {' '.join(args.models)} --rounds {args.rounds}"
        place = torch.cuda.get_device_name() if args.compute.startswith("cuda") else args.compute
        command = f"Command: `python benchmarks/deterministic.py {options} --compute {args.compute}`"
        head = [
            "# What `deterministic = true` gives and costs",
            "",
            f"{command}, torch {torch.__version__}, {place}.",
            "",
        ]
        args.out.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
