"""The engines that a recipe can name: what help and results say of each, and how it is built."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.task import Engine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.deterministic import require_deterministic_algorithms
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import PoolEngine


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
    native: bool = False
    """With kernels of our own on a processor, where they can be built."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        devices = f"{self.width} devices" if self.width > 1 else "one device"
        cluster = f"the cluster at {self.address}" if self.address else "on this machine"
        text = ENGINES[self.engine].shown.format(devices=devices, workers=self.workers, cluster=cluster) or self.engine
        text += ", compiled" if self.compiled else ", own kernels" if self.native else ""
        text += f", {self.threads} threads" if self.threads > 1 else ""
        text += ", deterministic" if self.deterministic else ""
        return text + (f" ({self.why})" if self.why else "")


@dataclass(frozen=True)
class EngineKind:
    """An engine that a recipe can name."""

    build: Callable[[EngineChoice, int], Engine]
    """The engine of a choice, for so many runs at once."""
    about: str = ""
    """What the help says of it beside its name."""
    shown: str = ""
    """What results say of a choice, with {devices}, {workers} and {cluster}; without one, its name."""
    has_native: bool = False
    """Whether it may train with kernels of our own on a processor."""
    has_width: bool = False
    """Whether it may train several devices in one call; one that does not takes no settings but `threads`."""


def build_serial_engine(pick: EngineChoice, runs: int) -> Engine:
    return SerialEngine()


def build_batched_engine(pick: EngineChoice, runs: int) -> Engine:
    return BatchedEngine(pick.width * runs, compiled=pick.compiled, native=pick.native)


def build_pool_engine(pick: EngineChoice, runs: int) -> Engine:
    return PoolEngine(pick.workers, pick.width, lambda: BatchedEngine(pick.width, native=pick.native))


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


ENGINES = {
    "serial": EngineKind(build_serial_engine),
    "batched": EngineKind(
        build_batched_engine, "many in one call", "batched, {devices} in a call", has_native=True, has_width=True
    ),
    "pool": EngineKind(
        build_pool_engine,
        "many processes",
        "pool, {workers} processes with {devices} in a call",
        has_native=True,
        has_width=True,
    ),
    "ray": EngineKind(build_ray_engine, "many machines", "ray, {cluster}, {devices} in a call", has_width=True),
    "flower": EngineKind(build_serial_engine, "real devices, by shoal server", "flower, real devices"),
}
"""By name. With `flower` real devices train, and the engine has nothing to do."""
