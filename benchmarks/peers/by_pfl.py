"""pfl-research: its own federated averaging and simulated backend.

torchrun --nproc-per-node 2 benchmarks/peers/by_pfl.py JOB ROUNDS [--threads 1]
"""
# pyright: reportMissingImports=false

import os
import sys
from importlib.metadata import version
from time import perf_counter

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # read when pfl is imported

import numpy as np
import torch
import torch.nn.functional as F
from jobs import JOBS, Job, asked, load, report
from networks import network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Learner(nn.Module):
    """A network with the two methods that pfl calls."""

    def __init__(self, job: Job):
        super().__init__()
        self.network = network(job.model)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y, eval).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when training begins and when each round ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *, model: object) -> Metrics:
        self.times.append(perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: object, model: object, *, central_iteration: int):
        self.times.append(perf_counter())
        return False, Metrics()


def data_of(job: Job) -> FederatedDataset:
    x, y = map(torch.from_numpy, load(job))
    users = get_user_sampler("random", list(range(job.devices)))
    return FederatedDataset(lambda user: Dataset((x[user], y[user])), users)


def train(job: Job, rounds: int) -> list[float]:
    """The seconds of every round."""
    learner, clock = Learner(job), Clock()
    server = torch.optim.SGD(learner.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=job.per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data_of(job), val_data=None, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(learner, local_optimizer_create=torch.optim.SGD, central_optimizer=server),
        NNTrainHyperParams(local_num_epochs=job.epochs, local_learning_rate=job.lr, local_batch_size=job.batch),
        NNEvalHyperParams(local_batch_size=None),
        [clock],
    )
    return np.diff(clock.times).tolist()


def main() -> None:
    given = asked(threads=(int, 1))
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    np.random.seed(0)
    seconds = train(JOBS[given.job], given.rounds + 1)
    if os.environ.get("RANK", "0") == "0":
        report(seconds, version=f"pfl {version('pfl')}, torch {torch.__version__}")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # at times a thread of gloo ends the interpreter with an error when all is done


if __name__ == "__main__":
    main()
