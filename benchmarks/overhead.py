"""What FedDH and FedDHAD cost the server: its seconds in a round beside those of a whole round of FedAvg.

    python benchmarks/overhead.py [--rounds 12] [--out benchmarks/results/overhead.md]

The server's seconds are those of everything that is not devices training: selection, plans, what is sent, decoding,
weights, combination, control parameters. A round of FedAvg is the paper's (10 devices of 500 samples, 5 epochs, batch
10) on the engine `serial`; the server's work does not depend on how long devices train, so the other rounds are short.
"""

import argparse
from pathlib import Path
from statistics import mean
from time import perf_counter

import torch

from shoal.core.session import train_jobs
from shoal.data.dataset import DATASETS, Dataset
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe

METHODS = {
    "FedAvg": "fedavg",
    "FedDH": "feddh",
    "FedDH, gradient on 100 server samples": "feddh(gradient_from='server_data')",
    "FedDHAD": "feddh+fedad(check=5, force=0, rule='fixed')",
}
PUBLISHED = {("FedDH", "lenet"): 0.086, ("FedDH", "cnn"): 0.042, ("FedDHAD", "lenet"): 0.122, ("FedDHAD", "cnn"): 0.156}
"""Table 2 of the paper, CIFAR-10."""


def make_recipe(model: str, method: str, **more) -> Recipe:
    values = {"devices": 100, "sample": 10, "batch": 10, "split": "dirichlet:0.5", "server_data": "per-class:10"}
    return Recipe().with_values(
        data="bench", model=model, method=method, fleet="tiers", engine="serial", **values | more
    )


def time_rounds(recipe: Recipe, rounds: int) -> tuple[float, float]:
    """Mean seconds of the server and of the devices in a round, the first left out."""
    assembly = assemble_run(recipe)
    loop = assembly.loop
    loop = type(loop)(**{**vars(loop), "evaluates": lambda row: False})
    server_state, server, devices = loop.start(assembly.net), [], []
    for number in range(rounds + 1):
        start = perf_counter()
        opened = loop.open_round(server_state, number)
        sent_at = perf_counter()
        outcomes = train_jobs(loop.host, opened.jobs_to_train)
        returned_at = perf_counter()
        server_state, _ = loop.close_round(opened, outcomes, returned_at - sent_at)
        server.append(sent_at - start + perf_counter() - returned_at)
        devices.append(returned_at - sent_at)
        assembly.memory.commit(number)
    return mean(server[1:]), mean(devices[1:])


def build_table(rounds: int) -> list[str]:
    lines = [
        "| model | method | server, ms a round | share of a FedAvg round | published |",
        "| --- | --- | --: | --: | --: |",
    ]
    for model in ("lenet", "cnn"):
        server_seconds, device_seconds = time_rounds(make_recipe(model, "fedavg", epochs="5"), 2)
        whole = server_seconds + device_seconds
        for label, method in METHODS.items():
            seconds, _ = time_rounds(make_recipe(model, method, steps="1"), rounds)
            published = f"{PUBLISHED[label, model]:.1%}" if (label, model) in PUBLISHED else ""
            lines.append(f"| {model} | {label} | {seconds * 1e3:.1f} | {seconds / whole:.2%} | {published} |")
        lines.append(f"| {model} | a round of FedAvg | {whole * 1e3:.0f} | | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(50_000, 3, 32, 32), torch.arange(50_000) % 10
    data = Dataset("bench", x, y, x[:10], y[:10], 10)
    DATASETS["bench"] = lambda: data
    lines = build_table(args.rounds)
    print("\n".join(lines))
    if args.out:
        command = f"Command: `python benchmarks/overhead.py --rounds {args.rounds}`"
        head = ["# What FedDH and FedDHAD cost the server", "", f"{command}, 1 thread, torch {torch.__version__}.", ""]
        Path(args.out).write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
