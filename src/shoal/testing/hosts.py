"""Hosts that record what goes through them, or change what devices answer: for laws and tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.core.device_host import DeviceHost
from shoal.core.model import tree
from shoal.core.model.tree import Params
from shoal.core.task import JobResult, Task
from shoal.core.types import Job, Outcome


class RecordingHost:
    """A host that keeps the jobs, outcomes and bytes of enrolment that go through it; `change_outcomes` may change
    outcomes on their way to the round. For everything else it is the host `inner`."""

    def __init__(self, inner: DeviceHost, change_outcomes: Callable[[list[Outcome]], list[Outcome]] = list):
        self.inner, self.change_outcomes = inner, change_outcomes
        self.jobs: list[list[Job]] = []
        self.outcomes: list[list[Outcome]] = []
        self.enrolled = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def make_tasks(self, jobs: Sequence[Job]) -> list[Task]:
        self.jobs.append(list(jobs))
        return self.inner.make_tasks(jobs)

    def store_results(self, results: Sequence[JobResult]) -> list[Outcome]:
        self.outcomes.append(self.change_outcomes(self.inner.store_results(results)))
        return self.outcomes[-1]

    def enrol(self, devices: Sequence[int]) -> dict[int, Params]:
        cards = self.inner.enrol(devices)
        self.enrolled += tree.count_tree_bytes(cards)
        return cards


class TamperingHost(RecordingHost):
    """A host whose devices answer something else than they should.

    `cards` are enrolment cards in the place of theirs, by device; None: it sends none.
    """

    def __init__(
        self, inner: DeviceHost, tamper: Callable[[Job, Outcome], Outcome], cards: Mapping[int, dict | None] = {}
    ):
        super().__init__(inner)
        self.tamper, self.cards = tamper, cards

    def store_results(self, results: Sequence[JobResult]) -> list[Outcome]:
        outcomes = self.inner.store_results(results)
        return [self.tamper(result.job, outcome) for result, outcome in zip(results, outcomes)]

    def enrol(self, devices: Sequence[int]) -> dict[int, Params]:
        cards = {device: self.cards.get(device, card) for device, card in self.inner.enrol(devices).items()}
        return {device: card for device, card in cards.items() if card is not None}
