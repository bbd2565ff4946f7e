"""Who trains the devices of one machine: crews get tasks and hand back what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shoal.core.local.device import TrainingSetup
from shoal.core.model.tree import Tree
from shoal.core.types import Job, Outcome


@dataclass(frozen=True, eq=False)
class Task:
    """A job, the site of the run it belongs to, and what the device remembers. One crew may serve several runs."""

    site: TrainingSetup
    job: Job
    memory: dict[str, Tree]


class TaskResult(NamedTuple):
    """The outcome of a task, and what the device remembers after it."""

    outcome: Outcome
    memory: dict[str, Tree]


class TrainingEngine(Protocol):
    """Trains devices; what comes out does not depend on who does it."""

    def train(self, tasks: Sequence[Task]) -> list[TaskResult]: ...

    def close(self) -> None:
        """Give back what is held: processes, graphs."""
        ...
