"""Rounds per second of the engine `serial` beside a plain hand-written PyTorch loop: same data, threads and process.

    python benchmarks/serial.py [--rounds 8] [--threads 1]

Rounds of both take turns, so that whatever else the machine does hits both alike; the ratio of the medians counts.
"""

import argparse
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.model.module_copy import copy_module
from shoal.core.session import Session, play_round
from shoal.data.dataset import DATASETS, Dataset
from shoal.models import build_model
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """Devices of equal size, some of which train for one epoch in a round."""

    model: str
    shape: tuple[int, ...]
    devices: int
    samples: int
    per_round: int
    batch: int = 10
    lr: float = 0.01


JOBS = {
    "LeNet, 10 of 100 devices, 500 samples": Job("lenet", (3, 32, 32), 100, 500, 10),
    "MLP 784-128-10, 100 of 1000 devices, 60 samples": Job("mlp", (784,), 1000, 60, 100),
}


def draw_dataset(job: Job) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    total = job.devices * job.samples
    y = torch.randint(0, 10, (total,), generator=generator)
    means = torch.randn(10, *job.shape, generator=generator) * 0.3
    x = torch.randn(total, *job.shape, generator=generator) + means[y]
    return Dataset("bench", x, y, x[:10], y[:10], 10)


class Plain:
    """Federated averaging as one would write it by hand: a module, an optimiser, a loop over shuffled indices."""

    def __init__(self, job: Job, data: Dataset):
        self.job, self.data = job, data
        self.model = copy_module(build_model(job.model, job.shape, 10, seed=0)).train()
        self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(data.targets), generator=self.generator)
        self.indices_by_device = order.view(job.devices, job.samples)

    def round(self) -> None:
        devices = torch.randperm(self.job.devices, generator=self.generator)[: self.job.per_round]
        total: dict[str, Tensor] = {}
        for device in devices.tolist():
            for name, value in self.train(self.indices_by_device[device]).items():
                total[name] = total[name] + value if name in total else value.clone()
        self.weights = {name: value / len(devices) for name, value in total.items()}

    def train(self, index: Tensor) -> dict[str, Tensor]:
        self.model.load_state_dict(self.weights)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=self.job.lr)
        x, y = self.data.inputs[index], self.data.targets[index]
        for rows in torch.randperm(len(index), generator=self.generator).split(self.job.batch):
            optimiser.zero_grad()
            F.cross_entropy(self.model(x[rows]), y[rows]).backward()
            optimiser.step()
        return self.model.state_dict()


class Shoal:
    """The same with shoal's loop, ledger and memory, as `shoal run` plays it."""

    def __init__(self, job: Job, data: Dataset, method: str):
        DATASETS["bench"] = lambda: data
        recipe = Recipe().with_values(
            method=method,
            data="bench",
            model=job.model,
            split="iid",
            devices=job.devices,
            sample=job.per_round,
            batch=job.batch,
            lr=job.lr,
            eval_every=10**9,
            rounds=10**9,
        )
        self.assembly = assemble_run(recipe)
        self.session = Session(self.assembly.loop, self.assembly.net)

    def round(self) -> None:
        play_round(self.session)


def time_round(work: Plain | Shoal) -> float:
    start = time.perf_counter()
    work.round()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} thread(s), one process, {args.rounds} rounds each, medians\n")
    print("| job | method | plain FedAvg loop, rounds/s | shoal, rounds/s | ratio |\n|---|---|---|---|---|")
    for name, job in JOBS.items():
        data = draw_dataset(job)
        for method in ("fedavg", "fedprox", "scaffold"):
            plain, ours = take_turns(Plain(job, data), Shoal(job, data, method), args.rounds)
            print(f"| {name} | {method} | {1 / plain:.2f} | {1 / ours:.2f} | {plain / ours:.2f} |", flush=True)


def take_turns(plain: Plain, ours: Shoal, rounds: int) -> tuple[float, float]:
    """The median seconds of a round of each; the first round of each only warms up."""
    times = [(time_round(plain), time_round(ours)) for _ in range(rounds + 1)][1:]
    return median(t for t, _ in times), median(t for _, t in times)


if __name__ == "__main__":
    main()
