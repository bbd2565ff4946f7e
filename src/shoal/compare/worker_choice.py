"""How many processes a comparison takes where nobody says: several for runs that leave the machine waiting."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from shoal.runs.build import Assembly, assemble_run
from shoal.runs.engine_choice import estimate_local_steps
from shoal.runs.recipe import Recipe

log = logging.getLogger("shoal")
MIN_DEVICE_ROUNDS = 20_000
"""Fewer devices trained in all runs together are done before other processes have started."""
DEVICE_SECONDS, STEP_SECONDS = 0.1e-3, 0.3e-3
"""On a GPU: Python for each device of a round, and one step of all its devices side by side (an H200, small models)."""
GPU_BYTES_PER_PROCESS = 2 << 30
"""Memory of a GPU that a process takes beside its data: torch's own, programs, and devices of a small model."""


def choose_workers(recipes: Sequence[Recipe], cores: int = 0) -> int:
    """The number of processes for these runs, which is logged with its reason where it is more than one.

    `cores` are those that may be used; 0: all that this process has. Runs with a checkpoint do not count: they may be
    complete, and then nothing is to be done, for which not even their data need be there.
    """
    new = [
        recipe for recipe in recipes if not recipe.out or not (Path(recipe.out) / "checkpoint.safetensors").is_file()
    ]
    if len(new) < 2 or new[0].engine in ("pool", "ray"):
        return 1
    if sum(recipe.rounds * recipe.sample for recipe in new) < MIN_DEVICE_ROUNDS:
        return 1
    workers, why = limit_workers(assemble_run(new[0]), len(new), cores or count_cores())
    if workers > 1:
        log.info("%d runs in %d processes (%s); --workers 1 for one", len(recipes), workers, why)
    return workers


def limit_workers(assembly: Assembly, runs: int, cores: int) -> tuple[int, str]:
    """How many processes pay, and why.

    On a processor: one for each core, where the engine uses one core; `auto` finds an engine that uses all of them. On
    a GPU: several where a round is mostly Python around devices; otherwise runs train side by side in one process.
    """
    recipe = assembly.recipe
    if assembly.net.place.type == "cpu":
        one_core = recipe.engine in ("serial", "batched") and recipe.threads <= 1
        return (min(runs, cores), f"the engine {recipe.engine} uses one core each") if one_core else (1, "")
    if not is_mostly_python(recipe.sample, estimate_local_steps(assembly)):
        return 1, ""
    free, _ = torch.cuda.mem_get_info(assembly.net.place)
    return max(1, min(runs, cores, free // GPU_BYTES_PER_PROCESS)), "a round is mostly Python around devices"


def is_mostly_python(devices: int, steps: float) -> bool:
    """Whether a GPU waits for Python in most of a round of so many devices with so many local steps each."""
    return devices * DEVICE_SECONDS > steps * STEP_SECONDS


def count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
