"""The device's side of a federation: answer enrolment and training requests with its own samples and memory.

Requests are untrusted: a device runs no code that a server names, and sends no text back.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.batch import Samples
from shoal.core.builtin_tasks import TASKS
from shoal.core.compose import Method
from shoal.core.errors import ShoalError, describe_error
from shoal.core.learning_task import LearningTask
from shoal.core.local.device import TrainingSetup
from shoal.core.losses import IGNORED_TARGET
from shoal.core.model import tree
from shoal.core.model.inputs import Inputs, get_input_shape, make_example, outline_sample
from shoal.core.model.net import Net
from shoal.core.server_state import ServerState
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER
from shoal.data.augment import parse_augment, refuse_augmenting
from shoal.data.dataset import Dataset, get_single_tensor
from shoal.data.local_tests import hold_out_rows
from shoal.data.sequences import MASK, pad_to_length
from shoal.data.text_columns import TextReading
from shoal.data.user_data import read_user_samples
from shoal.data.user_split import check_samples, number_classes
from shoal.engines.device_tests import DeviceTester
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.models import build_model
from shoal.models.hf_folder import (
    HF_MODEL,
    PUBLIC_NAME,
    fingerprint_hf_config,
    get_public_name,
    is_hf_model,
    read_hf_config,
)
from shoal.models.hf_model import refuse_unknown_tokens
from shoal.plugins.load import load_method
from shoal.remote.messages import (
    DeviceTestScore,
    RequestStamp,
    TrainRequest,
    problem_to_bytes,
    reply_to_bytes,
    score_to_bytes,
)
from shoal.remote.tree_bytes import tree_from_bytes, tree_to_bytes
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_optimiser import OPTIMISER_KEYS, make_optimiser
from shoal.runs.recipe_task import CLASS_OPTIONS, apply_loss, build_task, parse_class_weights
from shoal.runs.recipe_text import make_text_reading
from shoal.runs.task_targets import count_outputs, derive_labels, find_target_problem
from shoal.storage.durable import make_folders, sync_paths
from shoal.storage.memory import DeviceMemory, MemoryVersion
from shoal.storage.python_file import load_named_object

log = logging.getLogger("shoal")
MAX_REQUEST_BYTES = 1 << 31
"""The most bytes that a request may have."""
SETUP_KEYS = ("method", "model", "seed", "momentum", "weight_decay", "clip", "augment", "precision")
"""The recipe's values that devices are sent: names and numbers, nothing that could be run."""
LATER_SETUP_KEYS = (
    *(key for key in OPTIMISER_KEYS if key not in SETUP_KEYS),
    *("task", "loss", *CLASS_OPTIONS, "gradient_checkpointing"),
    "local_test",
)
"""Those that servers of the first version do not send; they trained with their defaults."""
REASON_CODES = {"no-data": "data", "disk": "disk", "damaged": "unread", "other-recipe": "model"}


class TimeLimitExceeded(Exception):
    """The server does not wait any longer."""


class MemoryLost(Exception):
    """The device has lost the version of its memory that the server asks for."""


class ModelAbsent(Exception):
    """The device has no folder with the model of the run, or one with another config."""


@dataclass(frozen=True)
class DeviceClient:
    """One device: where its samples are, the folder of its memories, and the one of its models of Hugging Face."""

    data: str
    folder: Path
    models: str = ""
    """Where folders with models lie, that a server may name; "" where none may."""

    def answer_request(self, payload: bytes, kind: str) -> bytes:
        """The reply to a request of this kind (enrol, train or judge); of an exception only a code is sent."""
        stamp = RequestStamp("unknown", -1, -1, "unknown")
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
        run_description = tree_from_bytes(payload, MAX_REQUEST_BYTES)["setup"]
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
        length, model = get_run_length(run_description), str(run_description["model"])
        if not length or not is_hf_model(model):
            return None
        own = find_own_model(model, str(run_description.get("model_config")), self.models)
        return make_text_reading({"model": own, "task": run_description["task"], "text_length": length})


def get_run_length(run_description: dict[str, Any]) -> int:
    """How many positions the padded sequences of a run have; 0 where samples are no such sequences."""
    example = run_description.get("example")
    mask = example.get(MASK) if isinstance(example, dict) else None
    return mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0


def pad_to_run_length(x: Inputs, y: Tensor, run_description: dict[str, Any]) -> tuple[Inputs, Tensor]:
    """A device's padded sequences, and targets of their positions, as long as those of the run."""
    length = get_run_length(run_description)
    if y.dim() == 2 and isinstance(x, dict) and MASK in x and y.shape == x[MASK].shape:
        y = torch.nn.functional.pad(y, (0, max(0, length - y.shape[1])), value=IGNORED_TARGET)
    return pad_to_length(x, length), y


def is_described_form(inputs: Inputs, run_description: dict[str, Any]) -> bool:
    """Whether a device's inputs are of the form that the run is about; a dict may have another order of its keys."""
    example = run_description.get("example")
    if isinstance(inputs, Tensor):
        return example is None and list(inputs.shape[1:]) == run_description["shape"]
    if isinstance(inputs, dict) and isinstance(example, dict):
        same_keys = inputs.keys() == example.keys()
        return same_keys and outline_sample({key: inputs[key] for key in example}) == outline_sample(example)
    return (
        isinstance(inputs, tuple) and isinstance(example, tuple) and outline_sample(inputs) == outline_sample(example)
    )


def read_device_task(run_description: dict[str, Any]) -> LearningTask:
    """The task of a run, one of the built-in ones; servers of the first version name none, and classify."""
    task = TASKS.get(run_description.get("task") or "classify")
    if task is None:
        raise ShoalError("damaged", "The server names no known task.", "Devices run nothing that they are sent.")
    return replace(task, skips_padding=bool(run_description.get("skips_padding")))


def are_described_targets(targets: Tensor, run_description: dict[str, Any]) -> bool:
    """Whether a device's targets are of the kind that the run's task is about."""
    task = read_device_task(run_description)
    if find_target_problem(targets, task):
        return False
    if task.has_class_logits:
        lowest = IGNORED_TARGET if task.skips_padding else 0
        return int(targets.max()) < run_description["classes"] and int(targets.min()) >= lowest
    columns = targets.shape[1] if targets.dim() > 1 else 1
    return bool(task.outputs) or columns == run_description["outputs"]


def build_device_setup(run_description: dict[str, Any], samples: Samples, models: str = "") -> TrainingSetup:
    """The training setup of a run on a device; names that stand for Python files are refused.

    A model of Hugging Face is one of the folder `models` of the device's own disk.
    """
    settings = {key: run_description[key] for key in SETUP_KEYS}
    settings |= {key: run_description[key] for key in LATER_SETUP_KEYS if key in run_description}
    if is_hf_model(str(settings["model"])):
        settings["model"] = find_own_model(settings["model"], str(run_description.get("model_config")), models)
        refuse_unknown_tokens(read_hf_config(settings["model"]), samples.inputs, settings["model"])
    elif ".py" in str(settings["model"]):
        raise ShoalError("damaged", "The server names a Python file.", "Devices run nothing that they are sent.")
    if any(".py" in str(settings.get(key, "")) for key in ("method", "task", "loss")):
        raise ShoalError("damaged", "The server names a Python file.", "Devices run nothing that they are sent.")
    recipe = Recipe().with_values(**settings)
    method: Method = load_method(recipe.method, recipe.parts)
    streams = RandomStreams(recipe.seed)
    example = run_description.get("example")
    shape = tuple(run_description["shape"]) if example is None else get_input_shape(example)
    classes = run_description["classes"]
    task = apply_loss(recipe, read_device_task(run_description), classes, samples.targets)
    outputs = run_description.get("outputs", classes)
    net: Net = build_model(recipe.model, shape, outputs, streams.derive_seed("init"), example, task.name)
    dtype = torch.float64 if recipe.precision == "float64" else torch.float32
    net = replace(net, module=net.module.to(dtype=dtype), half=recipe.precision == "bf16", task=task)
    net = replace(net, checkpointing=recipe.gradient_checkpointing)
    net = method.model(net)
    if net.digest != run_description.get("model_digest", ""):
        problem = "The model has other frozen tensors on this device than on the server."
        raise ShoalError("other-recipe", problem, "Install the same model on both.")
    no_samples = Samples(samples.inputs, samples.targets, torch.arange(0))
    get_samples: Callable[[int], Samples] = lambda device: no_samples if device == SERVER else samples  # noqa: E731
    augment = parse_augment(recipe.augment)
    if augment:
        refuse_augmenting(samples.inputs)
    return TrainingSetup(method, net, streams, make_optimiser(recipe), get_samples, augment)


def find_own_model(name: str, config: str, models: str) -> str:
    """The model of this name in the device's folder `models`, with the config that the run is about.

    The name is a word, or two with a slash between them, and never leads out of that folder.
    """
    word = name.removeprefix(HF_MODEL)
    if not PUBLIC_NAME.fullmatch(word):
        raise ShoalError("damaged", "The server names a path.", "Devices read nothing that a server names.")
    if not models:
        raise ModelAbsent(f"The run is about the model {word}: start `shoal join` with --models FOLDER.")
    folder = Path(models) / word
    try:
        own = fingerprint_hf_config(f"{HF_MODEL}{folder}") if folder.is_dir() else ""
    except (ShoalError, ValueError) as error:
        raise ModelAbsent(f"There is no config in {folder}.") from error
    if own != config:
        why = f"the config in {folder} is another one" if own else f"there is no folder {folder}"
        raise ModelAbsent(f"The run is about the model {word}, and {why}.")
    return f"{HF_MODEL}{folder}"


def read_thread_count(run_description: dict[str, Any]) -> int:
    """The run's number of threads, the same on every device: it changes the last digits of what is computed."""
    return Recipe().with_values(threads=run_description.get("threads", 0)).threads or 1


def build_run_description(
    recipe: Recipe, dataset: Dataset, moments: tuple[Tensor, Tensor] | None, digest: str = ""
) -> dict:
    """What the server sends every device of a run: values of the recipe, and form, classes and moments of the data.

    The form is the shape of one sample, or one sample of zeros where inputs are a dict or tuple of tensors. Of frozen
    tensors only the digest is sent: a device has its own, and refuses to train on others.
    """
    mean, std = moments or (None, None)
    settings = {key: getattr(recipe, key) for key in (*SETUP_KEYS, *LATER_SETUP_KEYS)}
    settings |= {"threads": recipe.threads, "model_digest": digest}
    if is_hf_model(recipe.model):
        settings |= {"model": get_public_name(recipe.model), "model_config": fingerprint_hf_config(recipe.model)}
    task = build_task(recipe, dataset)
    settings |= {"task": task.name, "skips_padding": task.skips_padding, "outputs": count_outputs(task, dataset)}
    if recipe.class_weights:
        weights = parse_class_weights(recipe.class_weights, task, dataset.classes, dataset.targets)
        settings["class_weights"] = ",".join(map(repr, weights))
    example = make_example(dataset.inputs)
    form = {"shape": list(dataset.input_shape)} if example is None else {"example": example}
    return settings | form | {"classes": dataset.classes, "mean": mean, "std": std}


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
