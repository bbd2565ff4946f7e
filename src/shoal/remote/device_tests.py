"""Real devices test the models that they would use on samples of their own; only four numbers of each travel."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex

import numpy as np

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.measures.device_tests import DeviceScores, find_judged_metric
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params
from shoal.core.phases import in_phase
from shoal.core.server_state import ServerState
from shoal.core.types import Job, Work
from shoal.core.wire import Message, pack_message
from shoal.remote.engine import RemoteDevices
from shoal.remote.messages import DeviceTestScore, RequestStamp, TrainRequest, decode_score_bytes

log = logging.getLogger("shoal")
SCORE_BYTES = 32
"""Bytes of a score: four numbers of 8 bytes."""


@dataclass(frozen=True, eq=False)
class RemoteDeviceTester:
    """Asks the devices of a round that answered to test; one that does not answer, or not as it could, is left out."""

    host: RemoteDevices
    sizes: np.ndarray
    """Training samples by device."""
    share: float
    """The share of its samples that each device has held back."""
    work: Callable[[int, int], Work]
    """(round, device) -> its work in a round, from which parts make that of fine-tuning."""
    max_targets: int = 1
    """How many targets a sample has at most."""
    newest: dict[int, DeviceScores] = field(default_factory=dict)
    """The scores of the last round that was judged, by its number."""

    def __call__(self, server_state: ServerState, params: Params, number: int) -> Row:
        devices = list(self.host.answered)
        message = pack_model(server_state.net, params)
        scores = self.ask_devices(server_state, message, devices, number)
        self.newest.clear()
        self.newest[number] = scores
        moved = {
            "down": {"judge": message.nbytes * len(devices)},
            "up": {"judge": SCORE_BYTES * len(scores.devices)},
        }
        return scores.summarise() | {"bytes_by": moved}

    def score_devices(self, server_state: ServerState, params: Params, number: int) -> DeviceScores:
        """What devices got after round `number`; of none where that round was not judged in this process."""
        return self.newest.get(number) or build_scores(server_state.net, {})

    @in_phase("evaluate")
    def ask_devices(self, server_state: ServerState, message: Message, devices: list[int], number: int) -> DeviceScores:
        """What these devices get with the models that they make of a global one."""
        engine, scores = self.host.remote_engine, dict[int, DeviceTestScore]()
        is_share = find_judged_metric(server_state.net.task).unit == "share"
        max_value = 1.0 if is_share else float(np.finfo(np.float32).max)
        requests = {}
        for device in devices:
            stamp = RequestStamp(engine.run_id, number, device, token_hex(8))
            job = Job(device, number, WHOLE_MODEL, message, self.work(number, device))
            since = self.host.find_memory_version(device)
            requests[device] = TrainRequest(
                stamp, engine.run_description, job, server_state.cuts, since, engine.reply_timeout
            )
        replies = engine.collect_replies({d: r.to_bytes() for d, r in requests.items()}, "judge") if requests else {}
        for device, reply in replies.items():
            try:
                if isinstance(reply, str):
                    raise ShoalError("damaged", reply, "It was not used.")
                most = round(self.share / (1 - self.share) * int(self.sizes[device])) + 1
                score = decode_score_bytes(reply, requests[device].stamp, most, self.max_targets, max_value)
                if score.samples:
                    scores[device] = score
            except ShoalError as error:
                log.warning("device %d, round %d, its own test: %s", device, number, error.problem)
        return build_scores(server_state.net, {device: scores[device] for device in sorted(scores)})


def pack_model(net: Net, params: Params) -> Message:
    """The judged model as devices are sent it: what is not personal, and what of that is not as it was at first."""
    personal = set(net.names_with_role("personal"))
    names = [k for k, v in params.items() if k not in personal or not bool((v == net.initial[k]).all())]
    return pack_message(params, {}, WHOLE_MODEL, net.slicer, names)


def build_scores(net: Net, scores: dict[int, DeviceTestScore]) -> DeviceScores:
    """The scores of devices together."""
    column = lambda name: np.array([getattr(score, name) for score in scores.values()], dtype=float)  # noqa: E731
    samples = np.array([score.samples for score in scores.values()], dtype=np.int64)
    better = find_judged_metric(net.task).better
    return DeviceScores(tuple(scores), column("sum"), column("count"), column("loss"), samples, better)
