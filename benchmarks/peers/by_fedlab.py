"""FedLab: its standalone pipeline with its own federated averaging, one process.

python benchmarks/peers/by_fedlab.py JOB ROUNDS [--threads 1]
"""
# pyright: reportMissingImports=false

import sys
import warnings
from importlib.metadata import version
from time import perf_counter
from types import ModuleType

import numpy as np
import torch
from jobs import JOBS, Job, asked, load, report
from networks import network
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", category=SyntaxWarning)
for name in ("transforms", "datasets"):  # FedLab's data sets import torchvision; none of them is used here
    part = sys.modules[f"torchvision.{name}"] = ModuleType(f"torchvision.{name}")
    setattr(sys.modules.setdefault("torchvision", ModuleType("torchvision")), name, part)

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402


class Devices(FedDataset):
    """The data of a job in FedLab's form."""

    def __init__(self, job: Job):
        self.x, self.y = map(torch.from_numpy, load(job))

    def get_dataset(self, id: int, type: str = "train") -> TensorDataset:
        return TensorDataset(self.x[id], self.y[id])

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        return DataLoader(self.get_dataset(id), batch_size=batch_size, shuffle=True)


class Timed(StandalonePipeline):
    """Notes the time where others would evaluate."""

    times: list[float]

    def main(self) -> None:
        self.times = [perf_counter()]
        super().main()

    def evaluate(self) -> None:
        self.times.append(perf_counter())


def train(job: Job, rounds: int) -> list[float]:
    """The seconds of every round."""
    model = network(job.model)
    trainer = FedAvgSerialClientTrainer(model, job.devices)
    trainer.setup_dataset(Devices(job))
    trainer.setup_optim(job.epochs, job.batch, job.lr)
    pipeline = Timed(FedAvgServerHandler(model, rounds, job.per_round / job.devices), trainer)
    pipeline.main()
    return np.diff(pipeline.times).tolist()


def main() -> None:
    given = asked(threads=(int, 1))
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    seconds = train(JOBS[given.job], given.rounds + 1)
    report(seconds, version=f"fedlab {version('fedlab')}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
