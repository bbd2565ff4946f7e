"""Which engine trains a run: the one that the recipe names, or, where it says `auto`, the quickest."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.conv import _ConvNd

from shoal.core.errors import ShoalError
from shoal.core.measures.forward_pass import run_model, use_forward_pass
from shoal.core.model.net import Net
from shoal.core.task import Engine
from shoal.engines.batched.forward_program import NativeForwardPass
from shoal.engines.deterministic import deterministic_algorithms
from shoal.engines.registry import ENGINES, EngineChoice
from shoal.engines.threads import use_threads
from shoal.engines.workers.malloc import keep_freed_memory
from shoal.runs.recipe import Recipe

if TYPE_CHECKING:
    from shoal.runs.build import Assembly

log = logging.getLogger("shoal")
LONG = 50_000
"""Steps above which compiling pays on a GPU: for LeNet it takes 5 seconds, and saves 0.15 ms of every step."""
NATIVE_MACS = 5e11
"""Multiply-accumulates of a run above which kernels of our own pay on a processor: 20 seconds of LeNet on one core."""


def parse_engine_choice(stored: Mapping[str, Any] | None) -> EngineChoice | None:
    """The engine choice that was stored as JSON; None where there is none, or none that is valid."""
    values: dict[str, Any] = {"threads": 0} | dict(stored or {})  # earlier versions took as many as the program had
    try:
        pick = EngineChoice(**values)
    except TypeError:
        return None
    numbers = ((pick.width, 1, 10**6), (pick.workers, 1, 10**4), (pick.threads, 0, 10**4))
    is_valid = all(type(number) is int and low <= number < high for number, low, high in numbers)
    is_known = pick.engine in ENGINES
    return pick if is_valid and is_known and isinstance(pick.address, str) else None


def restore_engine_choice(stored: Mapping[str, Any] | None, assembly: "Assembly") -> EngineChoice:
    """The engine choice for a resumed run: the stored one, or, where none can be read, a new one by the recipe."""
    pick = parse_engine_choice(stored) or choose_engine(assembly)
    if pick.threads or assembly.net.place.type != "cpu":
        return pick
    pick = replace(pick, threads=torch.get_num_threads())
    warning = "This run does not say with how many threads it was begun; it goes on with %d, and remembers that. "
    log.warning(warning + "If they were not so many, its last digits may differ.", pick.threads)
    return pick


@contextmanager
def use_engine_settings(pick: EngineChoice) -> Iterator[None]:
    """Inside, torch has the threads and the determinism of this choice, and evaluations its kernels."""
    forward_pass = NativeForwardPass(pick.workers) if pick.native else run_model
    with use_threads(pick.threads), deterministic_algorithms(pick.deterministic), use_forward_pass(forward_pass):
        yield


def build_engine(pick: EngineChoice, runs: int = 1) -> Engine:
    """The engine of a choice; for several runs at once, as many times as wide."""
    keep_freed_memory()
    return ENGINES[pick.engine].build(pick, runs)


def choose_engine(assembly: "Assembly") -> EngineChoice:
    """The engine choice of a run, which is logged where the recipe says `auto`."""
    recipe, pick = assembly.recipe, choose_engine_by_recipe(assembly)
    if recipe.deterministic and (assembly.net.place.type != "cpu" or pick.threads > 1):  # a single thread always is
        pick = replace(pick, deterministic=True)
    pick = replace(pick, native=wants_native_kernels(assembly, pick))
    if recipe.engine == "auto":
        log.info("engine: %s", pick)
    return pick


def wants_native_kernels(assembly: "Assembly", pick: EngineChoice) -> bool:
    """Whether a run is long enough for kernels that must be built first; by its sizes alone, so that bits repeat."""
    net, recipe = assembly.net, assembly.recipe
    if net.place.type != "cpu" or pick.threads > 1 or not ENGINES[pick.engine].has_native:
        return False
    samples = estimate_local_steps(assembly) * assembly.loop.work(0, 0).batch * recipe.sample * recipe.rounds
    return 3 * net.macs_forward * samples > NATIVE_MACS


def choose_engine_by_recipe(assembly: "Assembly") -> EngineChoice:
    """The engine that the recipe names, or for `auto` the quickest, before determinism is considered."""
    recipe, net = assembly.recipe, assembly.net
    refuse_contradictory_settings(recipe)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = recipe.threads or 1
    if recipe.gradient_checkpointing:
        why = "gradient_checkpointing is for devices one by one" if recipe.engine == "auto" else ""
        return EngineChoice("serial", threads=threads, why=why)
    if recipe.engine != "auto" and not ENGINES[recipe.engine].has_width:
        return EngineChoice(recipe.engine, threads=threads)
    if recipe.engine == "ray" and net.place.type == "cpu":
        return EngineChoice("ray", recipe.width or 1, address=recipe.address)
    if net.place.type == "cuda":
        width = recipe.width or min(assembly.loop.deadlines.count_devices_to_ask(recipe.sample), 512)
        steps = recipe.rounds * estimate_steps_in_turn(assembly)
        compiled = steps > LONG and not recipe.deterministic  # compilers choose by the clock
        pick = EngineChoice("batched", width, compiled=compiled, why="on a GPU", threads=recipe.threads)
        return replace(pick, engine="ray", address=recipe.address) if recipe.engine == "ray" else pick
    width = recipe.width or min(recipe.sample, 1 if has_convolutions(net) else 10)
    if recipe.engine == "batched":
        return EngineChoice("batched", width, threads=threads)
    if recipe.engine == "pool":
        return EngineChoice("pool", width, cores)
    from shoal.runs.engine_trial import find_quickest_engine  # which imports this module

    return find_quickest_engine(assembly, cores)


def refuse_contradictory_settings(recipe: Recipe) -> None:
    """Refuse settings that the recipe's engine has no use for."""
    if recipe.engine == "flower":
        advice = "Start one: shoal server RECIPE.toml --out FOLDER."
        raise ShoalError("bad-value", "engine is flower, and real devices come to a server.", advice)
    if recipe.address and recipe.engine != "ray":
        problem = f"address is {recipe.address!r}, and engine is {recipe.engine}, which knows no cluster."
        raise ShoalError("bad-value", problem, "Add --engine ray, or leave the address out.")
    if recipe.gradient_checkpointing and recipe.engine not in ("auto", "serial"):
        problem = f"gradient_checkpointing is given, and engine is {recipe.engine}, whose steps are traced as a whole."
        raise ShoalError("bad-value", problem, "Add --engine serial, or save memory by accumulate on any engine.")
    if recipe.width > 1 and (recipe.engine == "auto" or not ENGINES[recipe.engine].has_width):
        why = "finds its own" if recipe.engine == "auto" else "trains one device at a time"
        problem = f"width is {recipe.width}, and engine is {recipe.engine}, which {why}."
        raise ShoalError("bad-value", problem, "Add --engine batched, pool or ray, or leave the width out.")
    if recipe.threads > 1 and recipe.engine in ("pool", "ray"):
        problem = f"threads is {recipe.threads}, and engine is {recipe.engine}, which has a process for every core."
        raise ShoalError("bad-value", problem, "Add --engine serial or batched, or leave the threads out.")


def has_convolutions(net: Net) -> bool:
    """Whether a net has convolutions; those of several devices in one call are slow on a CPU."""
    return any(isinstance(m, _ConvNd) for m in net.module.modules())


def estimate_local_steps(assembly: "Assembly") -> float:
    """About how many local steps a device takes in a round."""
    loop = assembly.loop
    work, sizes = loop.work(0, 0), loop.sizes[loop.sizes > 0]
    return work.steps or max(1.0, work.epochs * float(sizes.mean()) / work.batch) if len(sizes) else 1.0


def estimate_steps_in_turn(assembly: "Assembly") -> float:
    """About how many steps a round takes one after the other: those of the largest of so many devices as take part."""
    loop, mean = assembly.loop, estimate_local_steps(assembly)
    sizes = loop.sizes[loop.sizes > 0]
    if not len(sizes) or loop.work(0, 0).steps:
        return mean
    largest = float(np.quantile(sizes, 1 - 1 / (1 + assembly.recipe.sample)))
    return mean * max(1.0, largest / float(sizes.mean()))
