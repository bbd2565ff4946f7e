"""The interface of engines: a task (setup, job, memory of a device) in, an outcome and a new memory out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.core.local.device import TrainingSetup
from shoal.core.model.tree import Tree
from shoal.core.types import Job, Outcome


@dataclass(frozen=True, eq=False)
class Task:
    """A device's job, the training setup of its run, and its memory. Tasks of several runs may go to one engine."""

    setup: TrainingSetup
    job: Job
    memory: dict[str, Tree]


class TaskResult(NamedTuple):
    """The outcome of a task, and the device's memory after it."""

    outcome: Outcome
    memory: dict[str, Tree]


class JobResult(NamedTuple):
    """What came of a job: it stays known by the job itself, in whichever round it comes back."""

    job: Job
    outcome: Outcome
    memory: dict[str, Tree]


class Engine(Protocol):
    """Trains devices: one result per task, in the order of the tasks. Results do not depend on the engine."""

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]: ...

    def close(self) -> None:
        """Free what the engine holds: worker processes, compiled programs, CUDA graphs."""
        ...


def estimate_steps(task: Task) -> float:
    """About how many local steps a task has: epochs x samples / batch, not rounded to whole batches."""
    work = task.job.work
    return work.steps or work.epochs * len(task.setup.samples(task.job.device)) / work.batch
