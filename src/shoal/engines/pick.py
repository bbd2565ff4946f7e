"""Which engine trains: as the recipe says, or, where it says `auto`, the one that is quickest for this run."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.conv import _ConvNd

from shoal.core.errors import ShoalError
from shoal.core.net import Net
from shoal.core.types import Work
from shoal.engines.batched import Batched
from shoal.engines.crew import Crew, Task
from shoal.engines.heap import keep_memory
from shoal.engines.machine import Machine
from shoal.engines.pool import Pool
from shoal.engines.serial import Serial

if TYPE_CHECKING:
    from shoal.assemble import Assembly

log = logging.getLogger("shoal")
SHORT = 20.0
"""Seconds of work below which it is not worth looking for anything quicker than `serial`."""
TRIAL = 0.5
"""About how many seconds each is tried, three times over."""
LONG = 100_000
"""Steps above which compiling pays on a GPU: for each operation it takes 60 ms, and saves 0.6 us of every step."""


@dataclass(frozen=True)
class Pick:
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
        return told + (", compiled" if self.compiled else "") + (f" ({self.why})" if self.why else "")


def read_pick(found: Mapping[str, Any] | None) -> Pick | None:
    """The pick that a run was begun with; None where there is none, or none that can be used here."""
    try:
        pick = Pick(**(found or {}))
    except TypeError:
        return None
    known = pick.engine in ("serial", "batched", "pool", "ray", "flower")
    sound = known and 0 < pick.width < 10**6 and 0 < pick.workers < 10**4
    return pick if sound and isinstance(pick.address, str) else None


def crew_of(pick: Pick, runs: int = 1) -> Crew:
    """Who trains; for several runs at once, with room for the devices of all of them."""
    keep_memory()
    match pick.engine:
        case "batched":
            return Batched(pick.width * runs, compiled=pick.compiled)
        case "pool":
            return Pool(pick.workers, pick.width, lambda: Batched(pick.width))
        case "ray":
            return cluster_of(pick, runs)
    return Serial()


def cluster_of(pick: Pick, runs: int) -> Crew:
    """A Ray cluster: one device after the other, as `serial` does it, or many in a call."""
    try:
        from shoal.engines.ray_crew import Cluster
    except ImportError:
        raise ShoalError("missing-extra", "Ray is not installed.", 'Run: pip install "shoal[ray]".') from None
    if pick.width == 1:
        return Cluster(pick.address)
    lanes = pick.width * runs
    return Cluster(pick.address, lambda: Batched(lanes, compiled=pick.compiled), lanes)


def settled(assembly: "Assembly") -> Pick:
    """The recipe's engine with its settings."""
    recipe, net = assembly.recipe, assembly.net
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if recipe.address and recipe.engine != "ray":
        problem = f"address is {recipe.address!r}, and engine is {recipe.engine}, which knows no cluster."
        raise ShoalError("bad-value", problem, "Add --engine ray, or leave the address out.")
    if recipe.width > 1 and recipe.engine in ("auto", "serial"):
        why = "finds its own" if recipe.engine == "auto" else "trains one device at a time"
        problem = f"width is {recipe.width}, and engine is {recipe.engine}, which {why}."
        raise ShoalError("bad-value", problem, "Add --engine batched, pool or ray, or leave the width out.")
    if recipe.engine == "flower":
        advice = "Start one: shoal server RECIPE.toml --out FOLDER."
        raise ShoalError("bad-value", "engine is flower, and real devices come to a server.", advice)
    if recipe.engine == "serial":
        return Pick("serial")
    if recipe.engine == "ray" and net.place.type == "cpu":
        return Pick("ray", recipe.width or 1, address=recipe.address)
    if net.place.type == "cuda":
        width = recipe.width or min(assembly.loop.patience.asked(recipe.sample), 512)
        steps = recipe.rounds * steps_of(assembly)
        pick = Pick("batched", width, compiled=steps > LONG, why="on a GPU")
        return (
            replace(pick, engine="ray", address=recipe.address) if recipe.engine == "ray" else told(pick, recipe.engine)
        )
    usual = recipe.width or min(recipe.sample, 1 if convolves(net) else 10)
    if recipe.engine == "batched":
        return Pick("batched", usual)
    if recipe.engine == "pool":
        return Pick("pool", usual, cores)
    return told(quickest(assembly, cores), "auto")


def told(pick: Pick, asked: str) -> Pick:
    if asked == "auto":
        log.info("engine: %s", pick)
    return pick


def quickest(assembly: "Assembly", cores: int) -> Pick:
    """By a short trial of each, unless the run is so short that the trial would cost more than it saves."""
    recipe, known, usual = assembly.recipe, Known(assembly, cores), steps_of(assembly)
    try:
        alone = seconds_per_step(Serial(), sampled(assembly, 1, min(4, ceil(usual))))
    except Exception:  # whatever it is, the run itself will meet it and tell it better
        return Pick("serial")
    total = alone * usual * recipe.sample * recipe.rounds
    if total < SHORT:
        return Pick("serial", why=f"about {max(1, round(total))} s of work")
    if pick := known.read():
        return pick
    found: dict[Pick, float] = {}
    for pick in (Pick("serial"), *candidates(assembly.net, cores, recipe.sample)):
        count = min(recipe.sample, 4 * pick.workers * pick.width)
        steps = min(ceil(usual), max(4, round(TRIAL * pick.workers / (alone * count))))
        crew = crew_of(pick)
        try:
            found[pick] = seconds_per_step(crew, sampled(assembly, count, steps))
        except Exception as error:
            log.debug("engine %s cannot be tried: %s", pick, error)
        finally:
            crew.close()
    best = min(found, key=lambda pick: found[pick])
    speed = found.get(Pick("serial"), alone) / found[best]
    pick = replace(best, why=f"{speed:.1f} times as fast as serial in a trial of {len(found)}")
    known.write(pick)
    return pick


def candidates(net: Net, cores: int, sample: int) -> list[Pick]:
    """What to try on a processor: one device or several in a call, in one process or one for each core."""
    widths = [1] if convolves(net) else [1, 5, 10, 20]
    fitting = [w for w in widths if w == 1 or 2 * w * cores <= sample]
    kinds = [("pool", cores)] if cores > 1 and hasattr(os, "fork") else []
    return [Pick(kind, width, workers) for kind, workers in (*kinds, ("batched", 1)) for width in fitting]


def convolves(net: Net) -> bool:
    """Convolutions of several devices in one call are slow on a processor."""
    return any(isinstance(m, _ConvNd) for m in net.module.modules())


def sampled(assembly: "Assembly", count: int, steps: int) -> list[Task]:
    """Tasks of the first round, cut down to a few steps; nothing of them is kept."""
    loop = assembly.loop
    assert isinstance(loop.engine, Machine)
    jobs = loop.ask(loop.start(assembly.net), 0).jobs
    short = [replace(j, work=Work(0.0, steps, j.work.batch, j.work.lr)) for j in jobs if j.device >= 0]
    return loop.engine.tasks([short[i % len(short)] for i in range(count)])


def seconds_per_step(crew: Crew, tasks: list[Task]) -> float:
    """The time of one step of one device; the first round, in which things are set up, does not count."""
    times = []
    for _ in range(3):
        began = perf_counter()
        crew.train(tasks)
        times.append(perf_counter() - began)
    return min(times[1:]) / sum(task.job.work.steps for task in tasks)


def steps_of(assembly: "Assembly") -> float:
    """About how many steps a device takes in a round."""
    loop = assembly.loop
    work, sizes = loop.work(0, 0), loop.sizes[loop.sizes > 0]
    return work.steps or max(1.0, work.epochs * float(sizes.mean()) / work.batch) if len(sizes) else 1.0


class Known:
    """Trials of the past, in the user's cache folder: one file, by all that a trial depends on."""

    def __init__(self, assembly: "Assembly", cores: int):
        recipe = assembly.recipe
        depends = (recipe.method, recipe.model, recipe.batch, recipe.sample, recipe.precision, assembly.net.input_shape)
        machine = (cores, torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
        self.key = blake2b(repr((depends, machine)).encode(), digest_size=12).hexdigest()
        self.file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "engines.json"

    def read(self) -> Pick | None:
        return read_pick(self._all().get(self.key))

    def write(self, pick: Pick) -> None:
        """Best effort: a cache that cannot be written costs another trial, nothing else."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self.file.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(self._all() | {self.key: pick.to_dict()}))
            temporary.replace(self.file)
        except OSError:
            pass

    def _all(self) -> dict[str, Any]:
        try:
            found = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
