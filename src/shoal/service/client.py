"""The device's side of a federation: answer enrolment and training requests with its own samples and memory.

Requests are untrusted: a device runs no code that a server names, and sends no text back.
"""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.errors import ShoalError, describe_error
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs
from shoal.core.server_state import ServerState
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.data.dataset import get_single_tensor
from shoal.data.local_tests import hold_out_rows
from shoal.data.text_columns import TextReading
from shoal.data.user_data import read_user_samples
from shoal.data.user_split import check_samples, number_classes
from shoal.engines.device_tests import DeviceTester
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.models.hf_folder import (
    is_hf_model,
)
from shoal.remote.messages import (
    UNREAD_STAMP,
    DeviceTestScore,
    RequestStamp,
    TrainRequest,
    problem_to_bytes,
    refuse_other_keys,
    reply_to_bytes,
    score_to_bytes,
)
from shoal.remote.tree_bytes import tree_from_bytes, tree_to_bytes
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_text import make_text_reading
from shoal.runs.task_targets import derive_labels
from shoal.service.run_compatibility import refuse_unknown_keys
from shoal.service.run_description import (
    KNOWN_KEYS,
    ModelAbsent,
    are_described_targets,
    build_device_setup,
    find_own_model,
    get_run_length,
    is_described_form,
    pad_to_run_length,
    read_device_task,
    read_thread_count,
)
from shoal.storage.durable import make_folders, sync_paths
from shoal.storage.memory import DeviceMemory, MemoryVersion
from shoal.storage.python_file import load_named_object

log = logging.getLogger("shoal")
MAX_REQUEST_BYTES = 1 << 31
"""The most bytes that a request may have."""
REASON_CODES = {
    "no-data": "data",
    "disk": "disk",
    "damaged": "unread",
    "other-recipe": "model",
    "unknown-name": "unknown",
    "bad-expression": "unknown",
}


class TimeLimitExceeded(Exception):
    """The server does not wait any longer."""


class MemoryLost(Exception):
    """The device has lost the version of its memory that the server asks for."""


@dataclass(frozen=True)
class DeviceClient:
    """One device: where its samples are, the folder of its memories, and the one of its models of Hugging Face."""

    data: str
    folder: Path
    models: str = ""
    """Where folders with models lie, that a server may name; "" where none may."""

    def answer_request(self, payload: bytes, kind: str) -> bytes:
        """The reply to a request of this kind (enrol, train or judge); of an exception only a code is sent."""
        stamp = UNREAD_STAMP
        try:
            stamp = RequestStamp.from_dict(tree_from_bytes(payload, MAX_REQUEST_BYTES)["stamp"])
            if kind == "enrol":
                return self.answer_enrolment(stamp, payload)
            return self.answer_judging(payload) if kind == "judge" else self.answer_training(payload)
        except BaseException as error:
            code = get_reason_code(error)
            log.warning("device %d, round %d: %s", stamp.device, stamp.round, code, exc_info=error)
            return problem_to_bytes(stamp, code)

    def answer_enrolment(self, stamp: RequestStamp, payload: bytes) -> bytes:
        """The reply to an enrolment request: the number of samples, and what the parts' `enrol` computes from them."""
        content = tree_from_bytes(payload, MAX_REQUEST_BYTES)
        refuse_other_keys(content, ("stamp", "setup"))
        run_description = content["setup"]
        with use_threads(read_thread_count(run_description)):
            samples, _ = self.prepare_halves(run_description, stamp.device)
            card = build_device_setup(run_description, samples, self.models).enrol(stamp.device)
        return tree_to_bytes({"stamp": stamp.to_dict(), "size": len(samples), "card": card})

    def answer_training(self, payload: bytes) -> bytes:
        train_request = TrainRequest.from_bytes(payload, MAX_REQUEST_BYTES)
        with limit_time(train_request.time_limit), use_threads(read_thread_count(train_request.run_description)):
            samples, _ = self.prepare_halves(train_request.run_description, train_request.stamp.device)
            local_devices = self.open_device(train_request, samples)
            memory = local_devices.memory
            [outcome] = train_jobs(local_devices, [train_request.job])
            if outcome.message is not None:
                memory.commit(train_request.stamp.round)
                memory.flush()
            return reply_to_bytes(train_request.stamp, outcome, bool(memory.versions))

    def answer_judging(self, payload: bytes) -> bytes:
        """What the device gets on the samples that it holds back, with the model that it makes of the one sent."""
        request = TrainRequest.from_bytes(payload, MAX_REQUEST_BYTES)
        device, round = request.stamp.device, request.stamp.round
        with limit_time(request.time_limit), use_threads(read_thread_count(request.run_description)):
            samples, tests = self.prepare_halves(request.run_description, device)
            if not len(tests):
                return score_to_bytes(request.stamp, DeviceTestScore(0.0, 0.0, 0.0, 0))
            local_devices = self.open_device(request, samples, keep_others=True)
            net = local_devices.setup.net
            tester = DeviceTester(local_devices, lambda _: tests, [device], lambda *_: request.job.work)
            params = net.initial | {name: entry["value"] for name, entry in request.job.message.body.items()}
            scores = tester.score_devices(ServerState(net, params, {}, cuts=request.cuts), params, round)
            found = (float(scores.sums[0]), float(scores.counts[0]), float(scores.losses[0]))
            return score_to_bytes(request.stamp, DeviceTestScore(*found, len(tests)))

    def open_device(self, request: TrainRequest, samples: Samples, keep_others: bool = False) -> LocalDevices:
        """The device with its samples, its memory and the model as it was pruned, ready to train or to test."""
        setup = build_device_setup(request.run_description, samples, self.models)
        nets = [setup.net]
        for cut in request.cuts:
            nets.append(nets[-1].cut(cut))
        cuts = [(net.slicer, cut) for net, cut in zip(nets, request.cuts)]
        memory = self.open_memory(request, cuts, keep_others)
        return LocalDevices(replace(setup, net=nets[-1]), memory, SerialEngine())

    def open_memory(self, train_request: TrainRequest, cuts: list, keep_others: bool) -> DeviceMemory:
        """The device's memory in the version that the server knows; later ones were never received by it.

        One who tests keeps the other versions: the server may stop before it notes the one that it was told of.
        """
        sync_paths(make_folders(self.folder))
        memory = DeviceMemory(self.folder / train_request.stamp.run)
        versions = (
            [] if train_request.since is None else [MemoryVersion(train_request.stamp.device, *train_request.since)]
        )
        try:
            memory.restore(versions, cuts, keep_others)
        except ShoalError as error:
            raise MemoryLost from error
        return memory

    def load_samples(self, text: TextReading | None = None) -> tuple[Inputs, Tensor]:
        """The device's inputs and labels as `data` gives them; `text` says how texts are read."""
        try:
            given = load_named_object(self.data) if ".py:" in self.data else self.data
            samples = read_user_samples(given() if callable(given) else given, text=text)
            if isinstance(samples.y, list) and not all(label.isdecimal() for label in samples.y):
                problem = "The classes have names, and every device would number them in its own way."
                raise ShoalError("no-data", problem, "Name them 0, 1, 2 and so on, alike on all devices.")
            [(x, y)] = number_classes([samples])
            check_samples((x, y))
        except (ShoalError, TimeLimitExceeded, ModelAbsent):
            raise
        except Exception as error:
            raise ShoalError(
                "no-data", f"The samples cannot be read ({describe_error(error)}).", "Look at --data."
            ) from error
        return x, y

    def prepare_halves(self, run_description: dict[str, Any], device: int) -> tuple[Samples, Samples]:
        """What the device trains on, and what it tests on: none, or the share of its samples that the run asks for."""
        refuse_unknown_keys(run_description, KNOWN_KEYS)
        samples = self.prepare_samples(run_description)
        share = Recipe().with_values(local_test=run_description.get("local_test", 0.0)).local_test
        labels, _ = derive_labels(read_device_task(run_description), samples.targets)
        seed = RandomStreams(run_description["seed"]).derive_seed("local-test")
        halves = hold_out_rows(np.arange(len(samples)), labels, share, seed, device)
        train, test = (replace(samples, index=torch.from_numpy(rows)) for rows in halves)
        return train, test

    def prepare_samples(self, run_description: dict[str, Any]) -> Samples:
        """The device's samples in the dtype and normalisation of the run; samples of another form are refused."""
        x, y = self.load_samples(self.make_own_text_reading(run_description))
        x, y = pad_to_run_length(x, y, run_description)
        dtype = torch.float64 if run_description["precision"] == "float64" else torch.float32

        def convert_values(x: Tensor) -> Tensor:
            return x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype) if x.is_floating_point() else x

        x = tree.map_tensors(convert_values, x)
        if not is_described_form(x, run_description) or not are_described_targets(y, run_description):
            raise ShoalError("no-data", "The samples are not of the form that the run is about.", "Prepare them anew.")
        if run_description["mean"] is not None:
            x = (get_single_tensor(x, "normalise") - run_description["mean"]) / run_description["std"]
        y = y.long() if read_device_task(run_description).has_class_logits else y.to(dtype)
        return Samples(x, y, torch.arange(len(y)))

    def make_own_text_reading(self, run_description: dict[str, Any]) -> TextReading | None:
        """How texts of this device are read: by the tokenizer in its own folder of the run's model."""
        length, model = get_run_length(run_description), str(run_description.get("model", ""))
        if not length or not is_hf_model(model):
            return None
        own = find_own_model(model, str(run_description.get("model_config")), self.models)
        return make_text_reading({"model": own, "task": run_description["task"], "text_length": length})


def get_reason_code(error: BaseException) -> str:
    """The code by which a reply tells of an exception; see DEVICE_PROBLEMS."""
    if isinstance(error, ShoalError):
        return REASON_CODES.get(error.kind.name, "failed")
    causes = {TimeLimitExceeded: "time", MemoryLost: "memory", ModelAbsent: "absent", OSError: "disk"}
    return next((code for kind, code in causes.items() if isinstance(error, kind)), "failed")


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeLimitExceeded after so many seconds: the server would not wait for the reply any longer."""

    def raise_time_limit(*_: object) -> None:
        raise TimeLimitExceeded

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGALRM, raise_time_limit)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
