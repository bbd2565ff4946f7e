"""The seam between the round and the place where devices train."""

from collections.abc import Sequence
from typing import Protocol

from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params
from shoal.core.server_state import EnrolmentCard
from shoal.core.types import Job, Outcome, Work


class DeviceHost(Protocol):
    """Where devices train; the only thing that differs between a laptop, a cluster and real devices."""

    def fit(self, jobs: Sequence[Job]) -> list[Outcome]: ...

    def train_on_server(self, params: Params, work: Work, number: int) -> Params:
        """Where the server's own training takes these parameters; no part has a say in it."""
        ...

    def enrol(self, devices: Sequence[int]) -> dict[int, EnrolmentCard]: ...

    def forget(self, devices: Sequence[int]) -> None:
        """Their answers were of no use: they remember what they did before this round."""
        ...

    def resize(self, net: Net, plan: Plan) -> None: ...

    @property
    def is_untrusted(self) -> bool:
        """Whether devices are elsewhere, so that what they say may be anything."""
        ...
