"""The simulated devices of one run: their memories are kept here, and an engine trains them."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from shoal.core.compose import Method
from shoal.core.local.device import TrainingSetup
from shoal.core.local.personal_model import build_personal_params
from shoal.core.model.flops import FlopCache
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.model.tree import Params
from shoal.core.task import Engine, JobResult, Task
from shoal.core.types import SERVER, Job, Outcome, Work
from shoal.core.wire import pack_message
from shoal.engines.slices import SlicedSetups
from shoal.storage.memory import DeviceMemory


class LocalDevices:
    """The devices of one run on this machine."""

    is_untrusted = False

    def __init__(self, setup: TrainingSetup, memory: DeviceMemory, engine: Engine):
        self.setup, self.memory, self.engine = setup, memory, engine
        self.slices = SlicedSetups(setup)
        self.server_setup = strip_parts(setup)

    def make_tasks(self, jobs: Sequence[Job]) -> list[Task]:
        return [self.slices.narrow_task(Task(self.setup, job, self.memory.get(job.device))) for job in jobs]

    def store_results(self, results: Sequence[JobResult]) -> list[Outcome]:
        """The outcomes; the memory of every device that succeeded is stored."""
        for job, outcome, memory in results:
            if outcome.message is not None:
                before = self.memory.get(job.device)
                self.memory.put(job.device, self.slices.widen_memory(memory, job.plan, before))
        return [result.outcome for result in results]

    def commit_round(self, number: int, kept: bool) -> None:
        self.memory.commit(number, kept)

    def discard_round(self) -> None:
        self.memory.discard()

    def train_on_server(self, params: Params, work: Work, number: int) -> Params:
        net = self.server_setup.net
        message = pack_message(params, {}, WHOLE_MODEL, net.slicer, net.names_with_role("shared", "server"))
        [result] = self.engine.train([Task(self.server_setup, Job(SERVER, number, WHOLE_MODEL, message, work), {})])
        delta = result.outcome.message
        return params if delta is None else params | {k: params[k] + e["value"] for k, e in delta.body.items()}

    def make_personal_model(self, device: int, params: Params, number: int) -> Params:
        """The parameters that a device would use itself after round `number`, `params` being the global model."""
        return build_personal_params(self.setup, params, self.memory.get(device), device, number)

    def enrol(self, devices: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        return {d: self.setup.enrol(d) for d in devices}

    def forget(self, devices: Sequence[int]) -> None:
        for device in devices:
            self.memory.staged.pop(device, None)

    def resize(self, net: Net, plan: Plan) -> None:
        self.memory.cut(self.setup.net.slicer, plan)
        self.setup = replace(self.setup, net=net, tally=FlopCache())
        self.slices, self.server_setup = SlicedSetups(self.setup), strip_parts(self.setup)


def strip_parts(setup: TrainingSetup) -> TrainingSetup:
    """The setup without any part: with it the server trains on its own samples."""
    kind = f"{setup.kind} of {setup.method}" if setup.kind else ""
    return replace(setup, method=Method(), tally=FlopCache(), kind=kind)
