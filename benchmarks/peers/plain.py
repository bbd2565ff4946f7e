"""Federated averaging as one would write it by hand in PyTorch: the measure of all others.

    python benchmarks/peers/plain.py JOB ROUNDS [--procs 1] [--threads 1] [--compute cpu]

With several processes each trains its share of the devices and sends back the sum of their weights.
"""

from multiprocessing.connection import Connection
from time import perf_counter

import torch
import torch.nn.functional as F
from jobs import JOBS, Job, asked, load, make_data, report
from networks import network
from torch import Tensor
from torch.multiprocessing import get_context
from turn import wait_for_turn

Weights = dict[str, Tensor]


class Trainer:
    """Trains one device after the other with a module, an optimiser and shuffled indices."""

    def __init__(self, job: Job, compute: str = "cpu", seed: int = 0):
        torch.manual_seed(seed)
        self.job = job
        self.x, self.y = (torch.from_numpy(array).to(compute) for array in load(job))
        self.model = network(job.model).to(compute).train()

    def train(self, weights: Weights, device: int) -> Weights:
        """The weights after local training; they are the module's own, and the next device overwrites them."""
        self.model.load_state_dict(weights)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=self.job.lr)
        x, y = self.x[device], self.y[device]
        for _ in range(self.job.epochs):
            for rows in torch.randperm(len(y), device=y.device).split(self.job.batch):
                optimiser.zero_grad()
                F.cross_entropy(self.model(x[rows]), y[rows]).backward()
                optimiser.step()
        return self.model.state_dict()

    def total(self, weights: Weights, devices: list[int]) -> Weights:
        """The sum of the weights of several devices."""
        found = {name: torch.zeros_like(value) for name, value in weights.items()}
        for device in devices:
            for name, value in self.train(weights, device).items():
                found[name] += value
        return found


class Alone:
    """All devices in this process."""

    def __init__(self, job: Job, compute: str):
        self.trainer = Trainer(job, compute)

    def total(self, weights: Weights, devices: list[int]) -> Weights:
        return self.trainer.total(weights, devices)


class Team:
    """The devices dealt out to several processes."""

    def __init__(self, job: str, processes: int, threads: int):
        make_data(JOBS[job])
        context = get_context("spawn")
        self.ends: list[Connection] = []
        for number in range(processes):
            near, far = context.Pipe()
            context.Process(target=serve, args=(far, job, threads, number), daemon=True).start()
            self.ends.append(near)

    def total(self, weights: Weights, devices: list[int]) -> Weights:
        sent = {name: value.numpy() for name, value in weights.items()}
        for number, end in enumerate(self.ends):
            end.send((sent, devices[number :: len(self.ends)]))
        sums = [end.recv() for end in self.ends]
        return {name: torch.from_numpy(sum(part[name] for part in sums)) for name in weights}


def serve(end: Connection, job: str, threads: int, number: int) -> None:
    """What a process of a team does until its end is closed."""
    torch.set_num_threads(threads)
    trainer = Trainer(JOBS[job], seed=number)
    while True:
        try:
            sent, devices = end.recv()
        except EOFError:
            return
        found = trainer.total({name: torch.from_numpy(value) for name, value in sent.items()}, devices)
        end.send({name: value.numpy() for name, value in found.items()})


def play(work: Alone | Team, job: Job, rounds: int, compute: str) -> list[float]:
    """The seconds of every round."""
    torch.manual_seed(0)
    weights: Weights = {name: value.clone() for name, value in network(job.model).to(compute).state_dict().items()}
    seconds = []
    for number in range(rounds):
        if number == 1:
            wait_for_turn()
        began = perf_counter()
        devices = torch.randperm(job.devices)[: job.per_round].tolist()
        total = work.total(weights, devices)
        weights = {name: value / len(devices) for name, value in total.items()}
        if compute != "cpu":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    return seconds


def main() -> None:
    given = asked(procs=(int, 1), threads=(int, 1), compute=(str, "cpu"))
    torch.set_num_threads(given.threads)
    job = JOBS[given.job]
    work = Team(given.job, given.procs, given.threads) if given.procs > 1 else Alone(job, given.compute)
    seconds = play(work, job, given.rounds + 1, given.compute)
    more = {"gpu_mib": torch.cuda.max_memory_allocated() / 2**20} if given.compute != "cpu" else {}
    report(seconds, version=f"torch {torch.__version__}", **more)


if __name__ == "__main__":
    main()
