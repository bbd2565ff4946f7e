"""The jobs of the speed benchmark: their sizes, their data, and the line in which a contestant reports.

Contestants run in environments of their own, so this file needs nothing but NumPy.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent.parent / ".peers"
"""Everything that the benchmark makes and that is not worth keeping."""
CLASSES = 10
TESTS = 10_000


@dataclass(frozen=True)
class Job:
    """Devices with equally many samples; in every round some of them train."""

    title: str
    model: str
    shape: tuple[int, ...]
    devices: int
    samples: int
    per_round: int
    epochs: int
    rounds: int
    """Rounds that are timed unless the command says otherwise."""
    batch: int = 10
    lr: float = 0.01


JOBS = {
    "standard": Job("LeNet, 10 of 100 devices, 500 samples, 5 epochs", "lenet", (3, 32, 32), 100, 500, 10, 5, 2),
    "small": Job("MLP 784-128-10, 100 of 1000 devices, 60 samples, 1 epoch", "mlp", (784,), 1000, 60, 100, 1, 10),
    "bigger": Job("CNN, 10 of 100 devices, 500 samples, 5 epochs", "cnn", (3, 32, 32), 100, 500, 10, 5, 1),
    "pfl": Job(
        "pfl-research's CIFAR-10 benchmark: CNN with dropout, 50 of 1000 devices, 50 samples, 1 epoch",
        *("pfl", (3, 32, 32), 1000, 50, 50, 1, 20),
        lr=0.1,
    ),
    "deep": Job("VGG11, 10 of 100 devices, 50 samples, 1 epoch", "vgg11", (3, 32, 32), 100, 50, 10, 1, 2),
    "recurrent": Job("LSTM, 20 of 100 devices, 100 samples, 1 epoch", "lstm", (32, 40), 100, 100, 20, 1, 5),
    "depthwise": Job(
        "a module with depthwise convolutions, 10 of 100 devices, 100 samples, 1 epoch",
        *("depthwise", (3, 32, 32), 100, 100, 10, 1, 5),
    ),
}
MAIN_JOBS = ("standard", "small", "bigger")
"""The jobs that all frameworks can play, and that are played where none is named."""


def load(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (devices x samples x ...) and labels, mapped from disk: processes share one copy of them in memory."""
    return mapped(job, "x"), mapped(job, "y")


def load_tests(job: Job) -> tuple[np.ndarray, np.ndarray]:
    return mapped(job, "test-x"), mapped(job, "test-y")


def mapped(job: Job, name: str) -> np.ndarray:
    """One array; every page of it is touched, so that no contestant meets page faults while it is timed."""
    path = make_data(job) / f"{name}.npy"
    found = np.load(path, mmap_mode="c")
    found.reshape(-1).view(np.uint8)[::4096].sum()
    return found


def make_data(job: Job) -> Path:
    """The folder with the data of a job, which is drawn when it is asked for the first time."""
    name = "x".join(map(str, (job.devices, job.samples, *job.shape)))
    folder = FOLDER / "data" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        draw(job, made)
        try:
            made.rename(folder)
        except OSError:  # another process was first, with the same numbers
            shutil.rmtree(made)
    return folder


def draw(job: Job, folder: Path) -> None:
    """Gaussian noise around a faint pattern for each class, so that there is something to learn."""
    generator = np.random.default_rng(0)
    patterns = 0.3 * generator.standard_normal((CLASSES, *job.shape), dtype=np.float32)
    for prefix, rows, size in (("", job.devices, job.samples), ("test-", 1, TESTS)):
        labels = generator.integers(0, CLASSES, (rows, size))
        inputs = np.lib.format.open_memmap(folder / f"{prefix}x.npy", "w+", np.float32, (rows, size, *job.shape))
        for row, of_row in enumerate(labels):
            inputs[row] = patterns[of_row] + generator.standard_normal((size, *job.shape), dtype=np.float32)
        inputs.flush()
        np.save(folder / f"{prefix}y.npy", labels)


def asked(**options: tuple[type, object]) -> argparse.Namespace:
    """The command line of a contestant: the job, the rounds to time, and options with their types and defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("rounds", type=int)
    for name, (kind, default) in options.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default)
    return parser.parse_args()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def report(seconds: Sequence[float], **more: object) -> None:
    """Tell the benchmark the seconds of every round; the first one only warmed up."""
    first, *timed = map(float, seconds)
    print("RESULT " + json.dumps({"seconds": timed, "first": first, **more}), flush=True)
