"""The interface between the round and the place where devices are: simulated here, on a cluster, or real."""

from collections.abc import Sequence
from typing import Protocol

from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params
from shoal.core.server_state import EnrolmentCard
from shoal.core.task import Engine, JobResult, Task
from shoal.core.types import Job, Outcome, Work


class DeviceHost(Protocol):
    """Knows the devices of a run and what they remember; nothing else differs between a laptop and real devices."""

    engine: Engine
    """What trains them."""

    def make_tasks(self, jobs: Sequence[Job]) -> list[Task]:
        """What the engine is given for these jobs, in the same order."""
        ...

    def store_results(self, results: Sequence[JobResult]) -> list[Outcome]:
        """The outcomes of these jobs; what devices remember takes effect when the round is committed."""
        ...

    def commit_round(self, number: int, kept: bool) -> None:
        """End a round: what devices remember of it takes effect, or is discarded where the round is not `kept`."""
        ...

    def discard_round(self) -> None:
        """Discard what devices remember of a round that will not end."""
        ...

    def train_on_server(self, params: Params, work: Work, number: int) -> Params:
        """These parameters after plain SGD on the server's own samples; parts do not act on it."""
        ...

    def enrol(self, devices: Sequence[int]) -> dict[int, EnrolmentCard]:
        """The enrolment cards of these devices; one that does not reply has none."""
        ...

    def forget(self, devices: Sequence[int]) -> None:
        """Discard what these devices remembered in this round, since their replies were not used."""
        ...

    def resize(self, net: Net, plan: Plan) -> None:
        """Train the pruned model `net` from now on; `plan` says what of the model before is left."""
        ...

    @property
    def is_untrusted(self) -> bool:
        """Whether devices run elsewhere, so that their replies may hold anything."""
        ...
