"""The server's side of a run with real devices: the same loop, run folder and ledger as in a simulation."""

import logging
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.metric import encode_metrics
from shoal.core.streams import RandomStreams
from shoal.data.dataset import has_moments
from shoal.engines.threads import use_threads
from shoal.remote.device_tests import RemoteDeviceTester
from shoal.remote.engine import MAX_CLAIMED_SAMPLES, RemoteDevices, RemoteEngine, Transport
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice
from shoal.runs.given_objects import is_handed_over
from shoal.runs.model_content import MODEL_NOTE, note_model_content, refuse_changed_content
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset
from shoal.runs.recipe_model import set_precision
from shoal.runs.session import ActiveRun, Result, Watcher, play_runs
from shoal.runs.start import drop_outdated_stop
from shoal.runs.store import RunFolder
from shoal.service.run_description import build_run_description

log = logging.getLogger("shoal")
ENROL_PAUSE = 3.0
"""Seconds between two enrolment requests to devices that have not replied yet."""


def adapt_recipe_to_devices(recipe: Recipe) -> Recipe:
    """The recipe with a checkpoint after every round, so that devices need to keep two memories only.

    What cannot work with real devices is refused: metrics on their samples, Python files, a GPU.
    """
    metrics = {"devices", "local", "class_kl"} & set(recipe.metrics)
    if metrics:
        problem = f"The metric {sorted(metrics)[0]} needs the samples of the devices, and those stay with them."
        raise ShoalError("bad-value", problem, "Leave it out.")
    if recipe.local_test_of != "train":
        problem = f"local_test_of is {recipe.local_test_of}, and real devices hold all of their samples themselves."
        raise ShoalError("bad-value", problem, "Leave it out; each device then tests on a share of its own.")
    if ".py:" in recipe.model or recipe.init:
        key = "init" if recipe.init else "model"
        problem = f"{key} names a file, and devices run and read nothing that a server names."
        raise ShoalError("bad-value", problem, "Use a model of the list (shoal list models).")
    for key in ("task", "loss"):
        if ".py:" in getattr(recipe, key):
            problem = f"{key} names a file, and devices run nothing that a server names."
            raise ShoalError("bad-value", problem, "Use a built-in task and its losses.")
    if recipe.parts:
        source = "a Python program" if is_handed_over(recipe.parts[0]) else recipe.parts[0]
        problem = f"The method has parts from {source}, and devices run nothing that a server names."
        raise ShoalError("bad-value", problem, "Install them on the server and on every device, as entry points.")
    if recipe.compute != "cpu":
        raise ShoalError("bad-value", f"compute is {recipe.compute}.", "The server of real devices works on cpu.")
    return recipe.with_values(checkpoint_every=1)


def play_server_run(
    path: Path,
    transport: Transport,
    reply_timeout: float,
    max_norm: float,
    enrol_timeout: float,
    watch: Watcher | None = None,
    max_samples: int = MAX_CLAIMED_SAMPLES,
) -> Result:
    """Play the run in this folder from its checkpoint to its end.

    A round waits `reply_timeout` seconds for replies, in which no tensor may have a norm above `max_norm`; a new run
    waits `enrol_timeout` seconds for its devices, none of which counts for more than `max_samples`.
    """
    folder = RunFolder.open(path)
    try:
        recipe = folder.read_recipe()
        if folder.read_note(MODEL_NOTE) is None:
            note_model_content(folder, recipe)
        refuse_changed_content(folder, recipe)
        assembly = assemble_run(replace(recipe, out=str(path)), folder.memory_folder, elsewhere=True)
        remote_engine = RemoteEngine(
            transport,
            get_run_id(folder),
            describe_run_for_devices(recipe, assembly.net.digest),
            reply_timeout,
            max_norm,
        )
        remote_devices = RemoteDevices(assembly.loop.host.setup, assembly.memory, remote_engine)
        checkpoint = folder.read_checkpoint(recipe, assembly.net, assembly.method.names)
        if checkpoint and checkpoint.server_state.cuts:
            remote_devices.resize(checkpoint.server_state.net, checkpoint.server_state.cuts[-1])
            remote_engine.cuts = checkpoint.server_state.cuts
        folder.write_note("metrics", encode_metrics(assembly.metrics))
        folder.write_note("task", assembly.task_note)
        history = folder.roll_back(checkpoint, assembly.memory)
        drop_outdated_stop(folder, recipe, history)  # only its patience stops such a run
        sizes = collect_sample_counts(folder, remote_devices, recipe.devices, enrol_timeout)
        for device in np.flatnonzero(sizes > max_samples):
            log.warning(
                "device %d says it has %d samples; it counts as if it had %d", device, sizes[device], max_samples
            )
        sizes = np.minimum(sizes, max_samples)
        if assembly.net.mixes_batch:
            sizes = np.where(sizes < 2, 0, sizes)
        loop = replace(assembly.loop, host=remote_devices, sizes=sizes, measure_replies=lambda round: {})
        if recipe.local_test:
            max_targets = assembly.evaluator.samples.targets[:1].numel() or 1
            tester = RemoteDeviceTester(remote_devices, sizes, recipe.local_test, loop.work, max_targets)
            loop, assembly = replace(loop, test_devices=tester), replace(assembly, device_tester=tester)
        engine_choice = EngineChoice("flower", threads=recipe.threads or 1)
        folder.write_note("engine", engine_choice.to_dict())
    except BaseException:
        folder.close()
        raise
    server_state = checkpoint.server_state if checkpoint else None
    active_run = ActiveRun(replace(assembly, loop=loop), engine_choice, folder, server_state, history, watch)
    return play_runs([active_run], remote_engine)[0]


@use_threads(1)
def describe_run_for_devices(recipe: Recipe, digest: str) -> dict:
    """The description of the run that every device is sent."""
    streams = RandomStreams(recipe.seed)
    dtype, _ = set_precision(recipe.precision, place := torch.device("cpu"))
    dataset = load_recipe_dataset(recipe, streams).to(dtype, place)
    has = recipe.normalises and has_moments(dataset.inputs)
    moments = dataset.find_moments(recipe.normalise_by) if has else None
    return build_run_description(recipe, dataset, moments, digest)


def get_run_id(folder: RunFolder) -> str:
    """The run's unique id, drawn at the first call; devices name the folder of their memories after it."""
    note = folder.read_note("run") or {"id": token_hex(8)}
    folder.write_note("run", note)
    return note["id"]


def collect_sample_counts(
    folder: RunFolder, remote_devices: RemoteDevices, devices: int, enrol_timeout: float
) -> np.ndarray:
    """The number of samples of each device, 0 where it did not enrol in time.

    They are stored when the run begins, so that no device can change its weight later.
    """
    sizes = (folder.read_note("enrolled") or {}).get("sizes")
    if sizes is None:
        counts: dict[int, int] = {}
        deadline = monotonic() + enrol_timeout
        while len(counts) < devices:
            counts |= remote_devices.ask_sample_counts([d for d in range(devices) if d not in counts])
            if monotonic() > deadline:
                break
            if len(counts) < devices:
                sleep(ENROL_PAUSE)
        for device in (d for d in range(devices) if d not in counts):
            log.warning("device %d did not come in %.0f s, and takes no part", device, enrol_timeout)
        if not counts:
            raise ShoalError("unreachable", "No device came.", "Start some with `shoal join`, then the server again.")
        sizes = [counts.get(d, 0) for d in range(devices)]
        folder.write_note("enrolled", {"sizes": sizes})
    return np.array(sizes, dtype=np.int64)
