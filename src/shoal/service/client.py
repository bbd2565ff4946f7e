"""What a device does with a question: it reads it with suspicion, trains on its own samples, and keeps its memory."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.compose import Method
from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.device import TrainingSetup
from shoal.core.model.net import Net
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER, Optimiser, Samples
from shoal.data.augment import parse_augment
from shoal.data.user_data import read_user_samples
from shoal.data.user_split import check_samples, number_classes
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.models import build_model
from shoal.plugins.load import load_method
from shoal.remote.messages import RequestStamp, TrainRequest, problem_to_bytes, reply_to_bytes
from shoal.remote.tree_bytes import tree_from_bytes, tree_to_bytes
from shoal.runs.recipe import Recipe
from shoal.storage.durable import make_folders, sync_paths
from shoal.storage.memory import DeviceMemory, MemoryVersion
from shoal.storage.python_file import load_named_object

log = logging.getLogger("shoal")
MAX_REQUEST_BYTES = 1 << 31
"""Bytes that a question may have."""
SETUP_KEYS = ("method", "model", "seed", "momentum", "weight_decay", "clip", "augment", "precision")
"""What devices are told of the recipe: names and numbers, nothing that could be run."""
REASON_CODES = {"no-data": "data", "disk": "disk", "damaged": "unread"}


class TimeLimitExceeded(Exception):
    """The server does not wait any longer."""


class MemoryLost(Exception):
    """What the device remembered is not there any more."""


@dataclass(frozen=True)
class DeviceClient:
    """One device: where its samples are, and the folder in which it remembers."""

    data: str
    folder: Path

    def answer_request(self, question: bytes, kind: str) -> bytes:
        """What goes back, whatever happens here; of what went wrong only a code travels."""
        stamp = RequestStamp("unknown", -1, -1, "unknown")
        try:
            stamp = RequestStamp(**tree_from_bytes(question, MAX_REQUEST_BYTES)["stamp"])
            return self.answer_enrolment(stamp, question) if kind == "enrol" else self.answer_training(question)
        except BaseException as error:
            code = get_reason_code(error)
            log.warning("device %d, round %d: %s", stamp.device, stamp.round, code, exc_info=error)
            return problem_to_bytes(stamp, code)

    def answer_enrolment(self, stamp: RequestStamp, question: bytes) -> bytes:
        """How many samples there are, and what the parts want to be known of them."""
        setup = tree_from_bytes(question, MAX_REQUEST_BYTES)["setup"]
        with use_threads(read_thread_count(setup)):
            samples = self.prepare_samples(setup)
            card = build_device_setup(setup, samples).enrol(stamp.device)
        return tree_to_bytes({"stamp": asdict(stamp), "size": len(samples), "card": card})

    def answer_training(self, question: bytes) -> bytes:
        order = TrainRequest.from_bytes(question, MAX_REQUEST_BYTES)
        with limit_time(order.seconds), use_threads(read_thread_count(order.setup)):
            site = build_device_setup(order.setup, self.prepare_samples(order.setup))
            nets = [site.net]
            for cut in order.cuts:
                nets.append(nets[-1].cut(cut))
            cuts = [(net.slicer, cut) for net, cut in zip(nets, order.cuts)]
            memory = self.open_memory(order, cuts)
            machine = LocalDevices(replace(site, net=nets[-1]), memory, SerialEngine())
            [outcome] = machine.fit([order.job])
            if outcome.message is not None:
                memory.commit(order.stamp.round)
                memory.flush()
            return reply_to_bytes(order.stamp, outcome, bool(memory.versions))

    def open_memory(self, order: TrainRequest, cuts: list) -> DeviceMemory:
        """What the device remembers as of the round that the server knows of; of later ones nobody heard."""
        sync_paths(make_folders(self.folder))
        memory = DeviceMemory(self.folder / order.stamp.run)
        known = [] if order.since is None else [MemoryVersion(order.stamp.device, *order.since)]
        try:
            memory.restore(known, cuts)
        except ShoalError as error:
            raise MemoryLost from error
        return memory

    def load_samples(self) -> tuple[Tensor, Tensor]:
        """The device's own samples as they are."""
        try:
            part = read_user_samples(load_named_object(self.data)() if ".py:" in self.data else self.data)
            if isinstance(part.y, list) and not all(label.isdecimal() for label in part.y):
                problem = "The classes have names, and every device would number them in its own way."
                raise ShoalError("no-data", problem, "Name them 0, 1, 2 and so on, alike on all devices.")
            [(x, y)] = number_classes([part])
            check_samples((x, y))
        except (ShoalError, TimeLimitExceeded):
            raise
        except Exception as error:
            raise ShoalError(
                "no-data", f"The samples cannot be read ({describe_error(error)}).", "Look at --data."
            ) from error
        return x, y

    def prepare_samples(self, setup: dict[str, Any]) -> Samples:
        """The same in the form of the run's."""
        x, y = self.load_samples()
        dtype = torch.float64 if setup["precision"] == "float64" else torch.float32
        x = x.to(dtype) / 255 if x.dtype == torch.uint8 else x.to(dtype) if x.is_floating_point() else x
        if list(x.shape[1:]) != setup["shape"] or int(y.max()) >= setup["classes"] or int(y.min()) < 0:
            raise ShoalError("no-data", "The samples are not of the form that the run is about.", "Prepare them anew.")
        if setup["mean"] is not None:
            x = (x - setup["mean"]) / setup["std"]
        return Samples(x, y.long(), torch.arange(len(y)))


def build_device_setup(setup: dict[str, Any], samples: Samples) -> TrainingSetup:
    """The place where devices of a run train, on a device: names that stand for files are refused."""
    given = {key: setup[key] for key in SETUP_KEYS}
    if any(".py" in str(given[key]) for key in ("method", "model")):
        raise ShoalError("damaged", "The server names a Python file.", "Devices run nothing that they are sent.")
    recipe = Recipe().with_values(**given)
    method: Method = load_method(recipe.method, recipe.parts)
    streams = RandomStreams(recipe.seed)
    net: Net = build_model(recipe.model, tuple(setup["shape"]), setup["classes"], streams.derive_seed("init"))
    dtype = torch.float64 if recipe.precision == "float64" else torch.float32
    net = method.model(replace(net, module=net.module.to(dtype=dtype), half=recipe.precision == "bf16"))
    nobody = Samples(samples.inputs, samples.targets, torch.arange(0))
    own: Callable[[int], Samples] = lambda device: nobody if device == SERVER else samples  # noqa: E731
    optimiser = Optimiser(recipe.momentum, recipe.weight_decay, recipe.clip)
    return TrainingSetup(method, net, streams, optimiser, own, parse_augment(recipe.augment))


def read_thread_count(setup: dict[str, Any]) -> int:
    """As many on every device, whatever its processor has: they are in the last digits of what it computes."""
    return Recipe().with_values(threads=setup.get("threads", 0)).threads or 1


def build_run_description(
    recipe: Recipe, shape: tuple[int, ...], classes: int, moments: tuple[Tensor, Tensor] | None
) -> dict:
    """What the server tells every device of a run."""
    mean, std = moments or (None, None)
    given = {key: getattr(recipe, key) for key in SETUP_KEYS}
    given |= {"threads": recipe.threads}
    return given | {"shape": list(shape), "classes": classes, "mean": mean, "std": std}


def get_reason_code(error: BaseException) -> str:
    """The code of what went wrong."""
    if isinstance(error, ShoalError):
        return REASON_CODES.get(error.kind.name, "failed")
    causes = {TimeLimitExceeded: "time", MemoryLost: "memory", OSError: "disk"}
    return next((code for kind, code in causes.items() if isinstance(error, kind)), "failed")


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Stop what takes longer: nobody would hear of it, and the device would be deaf meanwhile."""

    def raise_time_limit(*_: object) -> None:
        raise TimeLimitExceeded

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, raise_time_limit)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
