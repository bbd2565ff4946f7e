"""A run with real devices, on its server: the same loop, folder and ledger as any other run."""

import logging
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.engines.host import LocalDevices
from shoal.engines.threads import use_threads
from shoal.remote.engine import MAX_CLAIMED_SAMPLES, RemoteDevices, RemoteEngine, Transport
from shoal.runs.build import assemble_run, load_recipe_dataset, set_precision
from shoal.runs.engine_choice import EngineChoice
from shoal.runs.recipe import Recipe
from shoal.runs.session import ActiveRun, Result, Watcher, play_runs
from shoal.runs.store import RunFolder
from shoal.service.client import build_run_description

log = logging.getLogger("shoal")
ENROL_PAUSE = 3.0
"""Seconds between two looks for devices that have not come yet."""


def adapt_recipe_to_devices(recipe: Recipe) -> Recipe:
    """The recipe as a server runs it: a checkpoint after every round, so that devices need to keep two memories."""
    known = {"devices", "local", "class_kl"} & set(recipe.metrics)
    if known:
        problem = f"The metric {sorted(known)[0]} needs the samples of the devices, and those stay with them."
        raise ShoalError("bad-value", problem, "Leave it out.")
    if ".py:" in recipe.model or recipe.init:
        key = "init" if recipe.init else "model"
        problem = f"{key} names a file, and devices run and read nothing that a server names."
        raise ShoalError("bad-value", problem, "Use a model of the list (shoal list models).")
    if recipe.parts:
        problem = f"The method has parts from {recipe.parts[0]}, and devices run nothing that a server names."
        raise ShoalError("bad-value", problem, "Install them on the server and on every device, as entry points.")
    if recipe.compute != "cpu":
        raise ShoalError("bad-value", f"compute is {recipe.compute}.", "The server of real devices works on cpu.")
    return recipe.with_values(checkpoint_every=1)


def play_server_run(
    path: Path,
    post: Transport,
    seconds: float,
    bound: float,
    wait: float,
    watch: Watcher | None = None,
    max_samples: int = MAX_CLAIMED_SAMPLES,
) -> Result:
    """Play the run in this folder from where it stands to its end; no device counts for more than `max_samples`."""
    folder = RunFolder.open(path)
    try:
        recipe = folder.read_recipe()
        assembly = assemble_run(replace(recipe, out=str(path)), folder.memory_folder, elsewhere=True)
        simulated = assembly.loop.engine
        assert isinstance(simulated, LocalDevices)
        remote = RemoteEngine(post, get_run_id(folder), describe_run_for_devices(recipe), seconds, bound)
        distant = RemoteDevices(simulated.setup, assembly.memory, remote)
        found = folder.read_checkpoint(recipe, assembly.net, assembly.method.names)
        if found and found.server_state.cuts:
            distant.resize(found.server_state.net, found.server_state.cuts[-1])
            remote.cuts = found.server_state.cuts
        history = folder.roll_back(found, assembly.memory)
        sizes = collect_sample_counts(folder, distant, recipe.devices, wait)
        for device in np.flatnonzero(sizes > max_samples):
            log.warning(
                "device %d says it has %d samples; it counts as if it had %d", device, sizes[device], max_samples
            )
        sizes = np.minimum(sizes, max_samples)
        if assembly.net.mixes_batch:
            sizes = np.where(sizes < 2, 0, sizes)
        loop = replace(assembly.loop, engine=distant, sizes=sizes, look=lambda round: {})
        pick = EngineChoice("flower", threads=recipe.threads or 1)
        folder.write_note("engine", pick.to_dict())
    except BaseException:
        folder.close()
        raise
    standing = found.server_state if found else None
    ride = ActiveRun(replace(assembly, loop=loop), pick, folder, standing, history, watch)
    return play_runs([ride], remote)[0]


@use_threads(1)
def describe_run_for_devices(recipe: Recipe) -> dict:
    """What every device is told of the run."""
    streams = RandomStreams(recipe.seed)
    dtype, _ = set_precision(recipe.precision, place := torch.device("cpu"))
    dataset = load_recipe_dataset(recipe, streams).to(dtype, place)
    moments = dataset.moments if recipe.normalise and dataset.inputs.is_floating_point() else None
    return build_run_description(recipe, dataset.input_shape, dataset.classes, moments)


def get_run_id(folder: RunFolder) -> str:
    """A name for this run that no other run has; devices file their memories under it."""
    known = folder.read_note("run") or {"id": token_hex(8)}
    folder.write_note("run", known)
    return known["id"]


def collect_sample_counts(folder: RunFolder, distant: RemoteDevices, devices: int, wait: float) -> np.ndarray:
    """How many samples each device has: as it said when the run began, so that nobody's weight changes later."""
    known = (folder.read_note("enrolled") or {}).get("sizes")
    if known is None:
        found: dict[int, int] = {}
        end = monotonic() + wait
        while len(found) < devices:
            found |= distant.ask_sample_counts([d for d in range(devices) if d not in found])
            if monotonic() > end:
                break
            if len(found) < devices:
                sleep(ENROL_PAUSE)
        for device in (d for d in range(devices) if d not in found):
            log.warning("device %d did not come in %.0f s, and takes no part", device, wait)
        if not found:
            raise ShoalError("unreachable", "No device came.", "Start some with `shoal join`, then the server again.")
        known = [found.get(d, 0) for d in range(devices)]
        folder.write_note("enrolled", {"sizes": known})
    return np.array(known, dtype=np.int64)
