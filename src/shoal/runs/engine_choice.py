"""Which engine trains a run: the one that the recipe names, or, where it says `auto`, the quickest."""

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
from shoal.core.task import Engine
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
    """An engine and its settings; stored with a run, so that a resume computes in the same way."""

    engine: str
    width: int = 1
    """Devices that are trained in one call."""
    workers: int = 1
    """Worker processes."""
    compiled: bool = False
    why: str = ""
    """The reason for the choice, for people to read."""
    address: str = ""
    """The address of a Ray cluster; empty for this machine."""
    threads: int = 1
    """Threads of every process, the main one included; 0: as many as the program has."""
    deterministic: bool = False
    """Only operations that give the same bits every time."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        devices = f"{self.width} devices" if self.width > 1 else "one device"
        cluster = f"the cluster at {self.address}" if self.address else "on this machine"
        text = {
            "serial": "serial",
            "batched": f"batched, {devices} in a call",
            "pool": f"pool, {self.workers} processes with {devices} in a call",
            "ray": f"ray, {cluster}, {devices} in a call",
            "flower": "flower, real devices",
        }[self.engine]
        text += ", compiled" if self.compiled else ""
        text += f", {self.threads} threads" if self.threads > 1 else ""
        text += ", deterministic" if self.deterministic else ""
        return text + (f" ({self.why})" if self.why else "")


def parse_engine_choice(stored: Mapping[str, Any] | None) -> EngineChoice | None:
    """The engine choice that was stored as JSON; None where there is none, or none that is valid."""
    values: dict[str, Any] = {"threads": 0} | dict(stored or {})  # earlier versions took as many as the program had
    try:
        pick = EngineChoice(**values)
    except TypeError:
        return None
    numbers = ((pick.width, 1, 10**6), (pick.workers, 1, 10**4), (pick.threads, 0, 10**4))
    is_valid = all(type(number) is int and low <= number < high for number, low, high in numbers)
    is_known = pick.engine in ("serial", "batched", "pool", "ray", "flower")
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
    """Inside, torch has the threads and the determinism of this choice; afterwards those from before."""
    with use_threads(pick.threads), deterministic_algorithms(pick.deterministic):
        yield


def build_engine(pick: EngineChoice, runs: int = 1) -> Engine:
    """The engine of a choice; for several runs at once, as many times as wide."""
    keep_freed_memory()
    match pick.engine:
        case "batched":
            return BatchedEngine(pick.width * runs, compiled=pick.compiled)
        case "pool":
            return PoolEngine(pick.workers, pick.width, lambda: BatchedEngine(pick.width))
        case "ray":
            return build_ray_engine(pick, runs)
    return SerialEngine()


def build_ray_engine(pick: EngineChoice, runs: int) -> Engine:
    """An engine on a Ray cluster, whose workers train one device after the other or many in a call."""
    try:
        from shoal.engines.workers.ray_engine import RayEngine
    except ImportError:
        raise ShoalError("missing-extra", "Ray is not installed.", 'Run: pip install "shoal[ray]".') from None
    width = pick.width * runs if pick.width > 1 else 1

    def make_inner_engine() -> Engine:
        if pick.deterministic:
            require_deterministic_algorithms()
        return BatchedEngine(width, compiled=pick.compiled) if pick.width > 1 else SerialEngine()

    return RayEngine(pick.address, make_inner_engine, width)


def choose_engine(assembly: "Assembly") -> EngineChoice:
    """The engine choice of a run, which is logged where the recipe says `auto`."""
    recipe, pick = assembly.recipe, choose_engine_by_recipe(assembly)
    if recipe.deterministic and (assembly.net.place.type != "cpu" or pick.threads > 1):  # a single thread always is
        pick = replace(pick, deterministic=True)
    if recipe.engine == "auto":
        log.info("engine: %s", pick)
    return pick


def choose_engine_by_recipe(assembly: "Assembly") -> EngineChoice:
    """The engine that the recipe names, or for `auto` the quickest, before determinism is considered."""
    recipe, net = assembly.recipe, assembly.net
    refuse_contradictory_settings(recipe)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = recipe.threads or 1
    if recipe.engine == "serial":
        return EngineChoice("serial", threads=threads)
    if recipe.engine == "ray" and net.place.type == "cpu":
        return EngineChoice("ray", recipe.width or 1, address=recipe.address)
    if net.place.type == "cuda":
        width = recipe.width or min(assembly.loop.deadlines.count_devices_to_ask(recipe.sample), 512)
        steps = recipe.rounds * estimate_local_steps(assembly)
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
    """Whether a net has convolutions; those of several devices in one call are slow on a CPU."""
    return any(isinstance(m, _ConvNd) for m in net.module.modules())


def estimate_local_steps(assembly: "Assembly") -> float:
    """About how many local steps a device takes in a round."""
    loop = assembly.loop
    work, sizes = loop.work(0, 0), loop.sizes[loop.sizes > 0]
    return work.steps or max(1.0, work.epochs * float(sizes.mean()) / work.batch) if len(sizes) else 1.0
