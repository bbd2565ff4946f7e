"""Flower: its simulation on Ray with its own federated averaging; the devices train like those of the plain loop.

python benchmarks/peers/by_flower.py JOB ROUNDS [--workers 2]
"""
# pyright: reportMissingImports=false

import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)  # the workers of Ray import this file, too

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from jobs import JOBS, Job, asked, cores, make_data, report
from networks import network
from plain import Trainer


@cache
def trainer(job: str) -> Trainer:
    """What a worker keeps from one device to the next."""
    torch.set_num_threads(1)
    return Trainer(JOBS[job])


def reply(message: Message, context: Context, job: str) -> Message:
    """Train the device that a worker plays."""
    weights = message.content.array_records["arrays"].to_torch_state_dict()
    weights = trainer(job).train(weights, int(context.node_config["partition-id"]))
    metrics = MetricRecord({"num-examples": JOBS[job].samples})
    return Message(content=RecordDict({"arrays": ArrayRecord(weights), "metrics": metrics}), reply_to=message)


def client_of(job: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import by_flower  # by name, not by value: what it caches outlives the call

        return by_flower.reply(message, context, job)

    return app


class Timed(FedAvg):
    """Notes when each round begins."""

    def __init__(self, job: Job):
        super().__init__(
            fraction_train=job.per_round / job.devices,
            fraction_evaluate=0.0,
            min_train_nodes=job.per_round,
            min_available_nodes=job.devices,
        )
        self.times: list[float] = []

    def configure_train(self, *args, **kwargs):
        self.times.append(perf_counter())
        return super().configure_train(*args, **kwargs)


def server_of(job: Job, rounds: int) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        strategy = Timed(job)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(network(job.model).state_dict()), num_rounds=rounds)
        seconds = np.diff([*strategy.times, perf_counter()]).tolist()
        report(seconds, version=f"flwr {version('flwr')}, ray {version('ray')}, torch {torch.__version__}")

    return app


def main() -> None:
    given = asked(workers=(int, cores()))
    job = JOBS[given.job]
    make_data(job)
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        init = {"num_cpus": given.workers, "num_gpus": 0, "include_dashboard": False, "_temp_dir": folder}
        run_simulation(
            server_app=server_of(job, given.rounds + 1),
            client_app=client_of(given.job),
            num_supernodes=job.devices,
            backend_config={"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )


if __name__ == "__main__":
    main()
