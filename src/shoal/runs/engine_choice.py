"""Which engine trains: as the recipe says, or, where it says `auto`, the one that is quickest for this run."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.conv import _ConvNd

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.engines.base import TrainingEngine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.deterministic import deterministic_algorithms, require_deterministic_algorithms
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.engines.workers.fork import PoolEngine
from shoal.engines.workers.malloc import keep_freed_memory
from shoal.runs.recipe import Recipe

if TYPE_CHECKING:
    from shoal.runs.build import Assembly

log = logging.getLogger("shoal")
LONG = 100_000
"""Steps above which compiling pays on a GPU: for each operation it takes 60 ms, and saves 0.6 us of every step."""


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its settings; stored with a run, so that it goes on as it began."""

    engine: str
    width: int = 1
    """Devices in one call."""
    workers: int = 1
    """Processes."""
    compiled: bool = False
    why: str = ""
    address: str = ""
    """Of a Ray cluster; none for this machine."""
    threads: int = 1
    """Threads of every process, that of the server's own work included; 0: as many as the program has."""
    deterministic: bool = False
    """Only operations that give the same bits every time."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        many = f"{self.width} devices" if self.width > 1 else "one device"
        told = {
            "serial": "serial",
            "batched": f"batched, {many} in a call",
            "pool": f"pool, {self.workers} processes with {many} in a call",
            "ray": f"ray, {f'the cluster at {self.address}' if self.address else 'on this machine'}, {many} in a call",
            "flower": "flower, real devices",
        }[self.engine]
        told += ", compiled" if self.compiled else ""
        told += f", {self.threads} threads" if self.threads > 1 else ""
        told += ", deterministic" if self.deterministic else ""
        return told + (f" ({self.why})" if self.why else "")


def parse_engine_choice(found: Mapping[str, Any] | None) -> EngineChoice | None:
    """The pick that a run was begun with; None where there is none, or none that can be used here."""
    given: dict[str, Any] = {"threads": 0} | dict(found or {})  # earlier versions took as many as the program had
    try:
        pick = EngineChoice(**given)
    except TypeError:
        return None
    numbers = ((pick.width, 1, 10**6), (pick.workers, 1, 10**4), (pick.threads, 0, 10**4))
    sound = all(type(number) is int and low <= number < high for number, low, high in numbers)
    sound = sound and pick.engine in ("serial", "batched", "pool", "ray", "flower") and isinstance(pick.address, str)
    return pick if sound else None


def restore_engine_choice(found: Mapping[str, Any] | None, assembly: "Assembly") -> EngineChoice:
    """How a run is taken up again: as it was begun; where nobody knows how, as its recipe says."""
    pick = parse_engine_choice(found) or choose_engine(assembly)
    if pick.threads or assembly.net.place.type != "cpu":
        return pick
    pick = replace(pick, threads=torch.get_num_threads())
    told = "This run does not say with how many threads it was begun; it goes on with %d, and remembers that. "
    log.warning(told + "If they were not so many, its last digits may differ.", pick.threads)
    return pick


@contextmanager
def use_engine_settings(pick: EngineChoice) -> Iterator[None]:
    """Compute in here as a run does that was picked so; as before afterwards."""
    with use_threads(pick.threads), deterministic_algorithms(pick.deterministic):
        yield


def build_engine(pick: EngineChoice, runs: int = 1) -> TrainingEngine:
    """Who trains; for several runs at once, with room for the devices of all of them."""
    keep_freed_memory()
    match pick.engine:
        case "batched":
            return BatchedEngine(pick.width * runs, compiled=pick.compiled)
        case "pool":
            return PoolEngine(pick.workers, pick.width, lambda: BatchedEngine(pick.width))
        case "ray":
            return build_ray_engine(pick, runs)
    return SerialEngine()


def build_ray_engine(pick: EngineChoice, runs: int) -> TrainingEngine:
    """A Ray cluster: one device after the other, as `serial` does it, or many in a call."""
    try:
        from shoal.engines.workers.ray_engine import RayEngine
    except ImportError:
        raise ShoalError("missing-extra", "Ray is not installed.", 'Run: pip install "shoal[ray]".') from None
    lanes = pick.width * runs if pick.width > 1 else 1

    def make_inner_engine() -> TrainingEngine:
        if pick.deterministic:
            require_deterministic_algorithms()
        return BatchedEngine(lanes, compiled=pick.compiled) if pick.width > 1 else SerialEngine()

    return RayEngine(pick.address, make_inner_engine, lanes)


def choose_engine(assembly: "Assembly") -> EngineChoice:
    """The recipe's engine with its settings."""
    recipe, pick = assembly.recipe, choose_engine_by_recipe(assembly)
    if recipe.deterministic and (assembly.net.place.type != "cpu" or pick.threads > 1):  # a single thread always is
        pick = replace(pick, deterministic=True)
    if recipe.engine == "auto":
        log.info("engine: %s", pick)
    return pick


def choose_engine_by_recipe(assembly: "Assembly") -> EngineChoice:
    """The engine that was asked for, or that is quickest."""
    recipe, net = assembly.recipe, assembly.net
    refuse_contradictory_settings(recipe)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = recipe.threads or 1
    if recipe.engine == "serial":
        return EngineChoice("serial", threads=threads)
    if recipe.engine == "ray" and net.place.type == "cpu":
        return EngineChoice("ray", recipe.width or 1, address=recipe.address)
    if net.place.type == "cuda":
        width = recipe.width or min(assembly.loop.patience.count_devices_to_ask(recipe.sample), 512)
        steps = recipe.rounds * estimate_local_steps(assembly)
        compiled = steps > LONG and not recipe.deterministic  # compilers choose by the clock
        pick = EngineChoice("batched", width, compiled=compiled, why="on a GPU", threads=recipe.threads)
        return replace(pick, engine="ray", address=recipe.address) if recipe.engine == "ray" else pick
    usual = recipe.width or min(recipe.sample, 1 if has_convolutions(net) else 10)
    if recipe.engine == "batched":
        return EngineChoice("batched", usual, threads=threads)
    if recipe.engine == "pool":
        return EngineChoice("pool", usual, cores)
    from shoal.runs.engine_trial import find_quickest_engine  # which needs picks and crews itself

    return find_quickest_engine(assembly, cores)


def refuse_contradictory_settings(recipe: Recipe) -> None:
    """Settings that the recipe's engine has no use for."""
    if recipe.address and recipe.engine != "ray":
        problem = f"address is {recipe.address!r}, and engine is {recipe.engine}, which knows no cluster."
        raise ShoalError("bad-value", problem, "Add --engine ray, or leave the address out.")
    if recipe.width > 1 and recipe.engine in ("auto", "serial"):
        why = "finds its own" if recipe.engine == "auto" else "trains one device at a time"
        problem = f"width is {recipe.width}, and engine is {recipe.engine}, which {why}."
        raise ShoalError("bad-value", problem, "Add --engine batched, pool or ray, or leave the width out.")
    if recipe.threads > 1 and recipe.engine in ("pool", "ray"):
        problem = f"threads is {recipe.threads}, and engine is {recipe.engine}, which has a process for every core."
        raise ShoalError("bad-value", problem, "Add --engine serial or batched, or leave the threads out.")
    if recipe.engine == "flower":
        advice = "Start one: shoal server RECIPE.toml --out FOLDER."
        raise ShoalError("bad-value", "engine is flower, and real devices come to a server.", advice)


def has_convolutions(net: Net) -> bool:
    """Convolutions of several devices in one call are slow on a processor."""
    return any(isinstance(m, _ConvNd) for m in net.module.modules())


def estimate_local_steps(assembly: "Assembly") -> float:
    """About how many steps a device takes in a round."""
    loop = assembly.loop
    work, sizes = loop.work(0, 0), loop.sizes[loop.sizes > 0]
    return work.steps or max(1.0, work.epochs * float(sizes.mean()) / work.batch) if len(sizes) else 1.0
