"""Devices test the models that they would use on samples of their own: the global one, or what a method makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shoal.core.batch import Samples
from shoal.core.ledger import Row
from shoal.core.local.device import PERSONAL_KEY, TrainingSetup
from shoal.core.local.personal_model import build_personal_params, has_personal_models
from shoal.core.measures.device_tests import DeviceScores, score_one_model, score_own_models
from shoal.core.model.flops import FlopCache
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params, Tree
from shoal.core.phases import in_phase
from shoal.core.server_state import ServerState
from shoal.core.task import Task
from shoal.core.types import Job, Work
from shoal.core.wire import Message, pack_message
from shoal.engines.host import LocalDevices, strip_parts

FINETUNED_AT_ONCE = 64
"""Devices whose own models are trained further in one call of the engine."""


class DeviceScorer(Protocol):
    """Lets devices test the models that they would use on samples of their own."""

    def __call__(self, server_state: ServerState, params: Params, number: int) -> Row: ...

    def score_devices(self, server_state: ServerState, params: Params, number: int) -> DeviceScores: ...


@dataclass(frozen=True, eq=False)
class DeviceTester:
    """Judges the devices of a simulation on their own test samples."""

    host: LocalDevices
    tests: Callable[[int], Samples]
    devices: Sequence[int]
    """Those with test samples."""
    work: Callable[[int, int], Work]
    """(round, device) -> its work in a round, from which parts make that of fine-tuning."""

    def __call__(self, server_state: ServerState, params: Params, number: int) -> Row:
        return self.score_devices(server_state, params, number).summarise()

    @in_phase("evaluate")
    def score_devices(self, server_state: ServerState, params: Params, number: int) -> DeviceScores:
        """How every device does after round `number`, `params` being the model that is judged."""
        setup, net = self.host.setup, server_state.net
        tests = {device: self.tests(device) for device in self.devices}
        if not has_personal_models(setup.method, net):
            return score_one_model(net, params, tests)
        if is_pruned := net is not setup.net:  # by this round, which the host follows once it is committed
            setup = replace(setup, net=net, tally=FlopCache())

        def recall(device: int) -> dict[str, Tree]:
            memory = self.host.memory.get_newest(device)
            return self.host.setup.net.slicer.cut_tree(memory, server_state.cuts[-1]) if is_pruned else memory

        def make_params(device: int) -> Params:
            return build_personal_params(setup, params, recall(device), device, number)

        if not setup.method.parts_at("finetune"):
            return score_own_models(net, make_params, tests)
        plain_setup = strip_parts(setup) if is_pruned else self.host.server_setup
        models = FinetunedModels(self, setup, plain_setup, make_params, number)
        return score_own_models(net, models.get, tests)


class FinetunedModels:
    """The own models of devices after further training, some at a time, each of which is asked for once."""

    def __init__(
        self,
        tester: DeviceTester,
        setup: TrainingSetup,
        plain_setup: TrainingSetup,
        make_params: Callable[[int], Params],
        number: int,
    ):
        self.tester, self.setup, self.plain_setup, self.number = tester, setup, plain_setup, number
        self.make_params = make_params
        self.order = sorted(tester.devices, key=lambda device: len(tester.tests(device)))
        self.made: dict[int, Params] = {}

    def get(self, device: int) -> Params:
        if device not in self.made:
            waiting = [device, *(d for d in self.order if d != device)]
            self.made |= self.train(waiting[:FINETUNED_AT_ONCE])
        self.order = [d for d in self.order if d != device]
        return self.made.pop(device)

    def train(self, devices: Sequence[int]) -> dict[int, Params]:
        """The models of these devices after plain training on their own samples; nothing of it is kept."""
        net = self.plain_setup.net
        personal, models, tasks = net.names_with_role("personal"), {}, []
        shared_messages: dict[int, Message] = {}
        for device in devices:
            models[device] = own = self.make_params(device)
            work = self.tester.work(self.number, device)
            for part in self.setup.method.parts_at("finetune"):
                work = part.finetune(work)
            if id(own) not in shared_messages:  # where all devices begin with one model, it is packed once
                sent = net.names_with_role("shared", "server")
                shared_messages[id(own)] = pack_message(own, {}, WHOLE_MODEL, net.slicer, sent)
            job = Job(device, self.number, WHOLE_MODEL, shared_messages[id(own)], work)
            tasks.append(Task(self.plain_setup, job, {PERSONAL_KEY: {k: own[k] for k in personal}} if personal else {}))
        for device, (outcome, memory) in zip(devices, self.tester.host.engine.train(tasks)):
            if outcome.message is not None:
                own = models[device]
                models[device] = own | {k: own[k] + e["value"] for k, e in outcome.message.body.items()}
                models[device] |= memory.get(PERSONAL_KEY, {})
        return models
