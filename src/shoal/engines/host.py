"""The engine of one machine: it keeps what devices remember, and lets a crew train them."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.compose import Method
from shoal.core.local.device import TrainingSetup
from shoal.core.model.flops import FlopCache
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Params
from shoal.core.types import SERVER, Job, Outcome, Work
from shoal.core.wire import pack_message
from shoal.engines.base import Task, TaskResult, TrainingEngine
from shoal.engines.slices import SlicedSetups
from shoal.storage.memory import DeviceMemory


class LocalDevices:
    """Devices of one run, trained on this machine."""

    is_untrusted = False

    def __init__(self, site: TrainingSetup, memory: DeviceMemory, crew: TrainingEngine):
        self.site, self.memory, self.crew = site, memory, crew
        self.levels = SlicedSetups(site)
        self.plans: dict[int, Plan] = {}
        """What the devices of the present round train."""
        self.plain = strip_parts(site)

    def fit(self, jobs: Sequence[Job]) -> list[Outcome]:
        return self.store_results(self.crew.train(self.make_tasks(jobs)))

    def make_tasks(self, jobs: Sequence[Job]) -> list[Task]:
        self.plans = {job.device: job.plan for job in jobs}
        return [self.levels.narrow_task(Task(self.site, job, self.memory.get(job.device))) for job in jobs]

    def store_results(self, done: Sequence[TaskResult]) -> list[Outcome]:
        """Remember for every device that succeeded."""
        for outcome, memory in done:
            if outcome.message is not None:
                plan, before = self.plans[outcome.device], self.memory.get(outcome.device)
                self.memory.put(outcome.device, self.levels.widen_memory(memory, plan, before))
        return [outcome for outcome, _ in done]

    def train_on_server(self, params: Params, work: Work, number: int) -> Params:
        net = self.plain.net
        message = pack_message(params, {}, WHOLE_MODEL, net.slicer, net.names_with_role("shared", "server"))
        [done] = self.crew.train([Task(self.plain, Job(SERVER, number, WHOLE_MODEL, message, work), {})])
        change = done.outcome.message
        return params if change is None else params | {k: params[k] + e["value"] for k, e in change.body.items()}

    def enrol(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        return {d: self.site.enrol(d) for d in devices}

    def forget(self, devices: Sequence[int]) -> None:
        for device in devices:
            self.memory.staged.pop(device, None)

    def resize(self, net: Net, plan: Plan) -> None:
        self.memory.cut(self.site.net.slicer, plan)
        self.site = replace(self.site, net=net, tally=FlopCache())
        self.levels, self.plain = SlicedSetups(self.site), strip_parts(self.site)


def strip_parts(site: TrainingSetup) -> TrainingSetup:
    """The same place without any part: the server trains there on its own samples."""
    kind = f"{site.kind} of {site.method}" if site.kind else ""
    return replace(site, method=Method(), tally=FlopCache(), kind=kind)
