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

from shoal.data.dataset import DATASETS, Dataset
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe

METHODS = {
    "FedAvg": "fedavg",
    "FedDH": "feddh",
    "FedDH, gradient on 100 server samples": "feddh(gradient='server_data')",
    "FedDHAD": "feddh+fedad(check=5, force=0, rule='fixed')",
}
PUBLISHED = {("FedDH", "lenet"): 0.086, ("FedDH", "cnn"): 0.042, ("FedDHAD", "lenet"): 0.122, ("FedDHAD", "cnn"): 0.156}
"""Table 2 of the paper, CIFAR-10."""


def recipe_of(model: str, method: str, **more) -> Recipe:
    given = {"devices": 100, "sample": 10, "batch": 10, "split": "dirichlet:0.5", "server_data": "per-class:10"}
    return Recipe().with_values(
        data="bench", model=model, method=method, fleet="tiers", engine="serial", **given | more
    )


def played(recipe: Recipe, rounds: int) -> tuple[float, float]:
    """Mean seconds of the server and of the devices in a round, the first left out."""
    assembly = assemble_run(recipe)
    loop = assembly.loop
    loop = type(loop)(**{**vars(loop), "evaluates": lambda row: False})
    standing, server, devices = loop.start(assembly.net), [], []
    for number in range(rounds + 1):
        began = perf_counter()
        asked = loop.open_round(standing, number)
        told = perf_counter()
        outcomes = loop.engine.fit(asked.jobs_to_train)
        back = perf_counter()
        standing, _ = loop.close_round(asked, outcomes, back - told)
        server.append(told - began + perf_counter() - back)
        devices.append(back - told)
        assembly.memory.commit(number)
    return mean(server[1:]), mean(devices[1:])


def table(rounds: int) -> list[str]:
    lines = [
        "| model | method | server, ms a round | share of a FedAvg round | published |",
        "| --- | --- | --: | --: | --: |",
    ]
    for model in ("lenet", "cnn"):
        server, devices = played(recipe_of(model, "fedavg", epochs="5"), 2)
        whole = server + devices
        for label, method in METHODS.items():
            own, _ = played(recipe_of(model, method, steps="1"), rounds)
            told = PUBLISHED.get((label, model))
            lines.append(
                f"| {model} | {label} | {own * 1e3:.1f} | {own / whole:.2%} | {f'{told:.1%}' if told else ''} |"
            )
        lines.append(f"| {model} | a round of FedAvg | {whole * 1e3:.0f} | | |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(50_000, 3, 32, 32), torch.arange(50_000) % 10
    data = Dataset("bench", x, y, x[:10], y[:10], 10)
    DATASETS["bench"] = lambda: data
    lines = table(given.rounds)
    print("\n".join(lines))
    if given.out:
        command = f"Command: `python benchmarks/overhead.py --rounds {given.rounds}`"
        head = ["# What FedDH and FedDHAD cost the server", "", f"{command}, 1 thread, torch {torch.__version__}.", ""]
        Path(given.out).write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
